# Simon Willison's llm: a model of its extra-openai-models.yaml, a question, a chat that goes on, a schema.
set -euo pipefail
export LLM_USER_PATH=$PWD/llm
mkdir -p "$LLM_USER_PATH"
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<END
- model_id: demo
  model_name: demo
  api_base: $OPENAI_BASE_URL
  api_key_name: minisgl
  supports_tools: true
  supports_schema: true
END
llm keys set minisgl --value "$OPENAI_API_KEY"
llm -m demo -o temperature 0 'What is 12 + 30?' | grep 42
llm -m demo -o temperature 0 --no-stream 'What is 12 + 30?' | grep 42
llm -c -o temperature 0 'What is 3 + 4?' | grep 7
llm -m demo -o temperature 0 --schema 'name, age int' 'Ann is 41 years old.' | grep '"age": *41'
echo "a question, streamed and whole, a chat that goes on, a schema"
