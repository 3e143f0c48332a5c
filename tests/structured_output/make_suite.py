"""Makes json_schema_test_suite.json from jsonschema's source distribution, which holds the JSON Schema Test Suite.

pip download --no-deps --no-binary :all: jsonschema
python tests/structured_output/make_suite.py jsonschema-*.tar.gz
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

FOLDER = "json/tests/draft2020-12/"
OUT = Path(__file__).with_name("json_schema_test_suite.json")


def main(archive: str) -> None:
    cases = []
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda one: one.name):
            _, _, name = member.name.partition(FOLDER)
            is_wanted = name.endswith(".json") and ("/" not in name or name.startswith("optional/format/"))
            if not is_wanted or (content := files.extractfile(member)) is None:
                continue
            for group in json.load(content):
                instances = [[test["data"], test["valid"]] for test in group["tests"]]
                if isinstance(group["schema"], dict):
                    group["schema"].pop("$schema", None)
                cases.append([f"{name.removesuffix('.json')}: {group['description']}", group["schema"], instances])
    OUT.write_text("\n".join(["[", ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases), "]", ""]))
    print(f"{len(cases)} cases in {OUT}")


if __name__ == "__main__":
    main(sys.argv[1])
