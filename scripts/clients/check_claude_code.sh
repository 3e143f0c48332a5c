# Claude Code's command line, one question without its tools: their descriptions alone are 20,000 tokens of a usual model,
# and four times as many bytes, which are the demo model's tokens. The demo model's answer means nothing.
set -euo pipefail
export ANTHROPIC_MODEL=demo ANTHROPIC_DEFAULT_HAIKU_MODEL=demo ANTHROPIC_DEFAULT_SONNET_MODEL=demo
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS=4096 DISABLE_AUTOUPDATER=1
answer=$(claude -p 'What is 12 + 30?' --system-prompt 'Be brief.' --tools '' --output-format json)
node -e 'const a = JSON.parse(process.argv[1]); if (a.is_error || a.usage.output_tokens < 1) { console.error(a); process.exit(1) }' \
  "$answer"
echo "one question on the command line, without tools"
