# opencode's command line, one question with a short system message and no tools: all of them are 29,000 of the demo
# model's tokens.
set -euo pipefail
cat >opencode.json <<SETTINGS
{
  "provider": {
    "minisgl": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
      "models": {"demo": {"limit": {"context": 4096, "output": 500}}}
    }
  },
  "agent": {"plain": {"mode": "primary", "prompt": "Be brief.", "tools": {"*": false}}}
}
SETTINGS
answer=$(opencode run --agent plain --title title --model minisgl/demo 'What is 12 + 30?')
echo "$answer"
grep -q 42 <<<"$answer"
echo "one question on the command line"
