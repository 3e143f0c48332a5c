# Codex's command line, one question with a short system message and few tools: all of them are 27,000 of the demo model's
# tokens.
set -euo pipefail
export CODEX_HOME=$PWD/codex
mkdir -p "$CODEX_HOME"
echo 'Be brief.' >"$CODEX_HOME/instructions.md"
cat >"$CODEX_HOME/config.toml" <<SETTINGS
model = "demo"
model_provider = "minisgl"
model_instructions_file = "$CODEX_HOME/instructions.md"
web_search = "disabled"
include_apps_instructions = false
include_collaboration_mode_instructions = false
include_environment_context = false
include_permissions_instructions = false
skills = {include_instructions = false, bundled = {enabled = false}}
agents = {enabled = false}
features = {apps = false, goals = false, shell_tool = false, unified_exec = false}

[model_providers.minisgl]
name = "minisgl"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
SETTINGS
answer=$(codex exec --json --skip-git-repo-check 'What is 12 + 30?')
echo "$answer"
grep '"agent_message"' <<<"$answer" | grep -q 42
grep -q '"turn.completed"' <<<"$answer"
echo "one question on the command line, over /v1/responses"
