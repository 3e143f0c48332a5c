# aiperf: a closed loop of two clients, streamed chats, synthetic prompts made with the demo model's tokenizer.
set -euo pipefail
unset HF_HUB_OFFLINE  # or it looks for the tokenizer in the cache of downloads alone
aiperf profile --model demo --url "$MINISGL_URL" --endpoint-type chat --streaming --concurrency 2 --request-count 12 \
  --tokenizer "$MINISGL_DEMO" --synthetic-input-tokens-mean 128 --output-tokens-mean 32 \
  --header "Authorization: Bearer $OPENAI_API_KEY" --artifact-dir "$PWD/aiperf" --ui none >aiperf.log 2>&1 ||
  { tail -30 aiperf.log; exit 1; }
tail -40 aiperf.log
test -n "$(find aiperf -name '*.json*')"
echo "a benchmark of 12 streamed chats with synthetic prompts"
