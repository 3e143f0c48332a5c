# lm-eval: choices by their log-probabilities and answers by text, by prompts and by token ids, and by chats.
set -euo pipefail
cd "$MINISGL_CLIENTS/lm_eval"
common="base_url=$OPENAI_BASE_URL/completions,model=demo,num_concurrent=4,auth_token=$OPENAI_API_KEY"
lm_eval run --model local-completions --tasks minisgl_choice,minisgl_answer --include_path . \
  --model_args "$common,tokenizer_backend=auto"
lm_eval run --model local-completions --tasks minisgl_choice --include_path . \
  --model_args "$common,tokenizer_backend=huggingface,tokenizer=$MINISGL_DEMO,tokenized_requests=True"
lm_eval run --model local-chat-completions --tasks minisgl_answer --include_path . --apply_chat_template \
  --model_args "base_url=$OPENAI_BASE_URL/chat/completions,model=demo,num_concurrent=4"
echo "choices by log-probabilities, of texts and token ids; answers by completions and chats"
