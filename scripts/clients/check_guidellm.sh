# guidellm: a closed loop of two clients, synthetic prompts made with the demo model's tokenizer.
set -euo pipefail
guidellm run --backend "kind=openai_http,target=$MINISGL_URL,model=demo" --profile kind=concurrent,streams=2 \
  --constraint kind=max_requests,count=12 --data kind=synthetic_text,prompt_tokens=128,output_tokens=32 \
  --tokenizer "kind=hf_auto,model=$MINISGL_DEMO" --disable-progress >guidellm.log 2>&1 || { tail -30 guidellm.log; exit 1; }
tail -30 guidellm.log
echo "a benchmark of 12 requests with synthetic prompts"
