# aider: one message to an empty file. The demo model cannot edit code: what counts is that aider got an answer.
set -euo pipefail
rm -rf project && mkdir project && cd project
touch hello.py
aider --model openai/demo --openai-api-base "$OPENAI_BASE_URL" --no-git --no-check-update --no-show-model-warnings \
  --no-analytics --no-auto-lint --no-pretty --map-tokens 0 --edit-format whole --yes-always --no-show-release-notes \
  --message 'What is 12 + 30?' hello.py >answer.txt 2>&1 || { cat answer.txt; exit 1; }
cat answer.txt
grep -E 'Tokens: .* sent, .* received' answer.txt
echo "a message about a file, answered in a stream"
