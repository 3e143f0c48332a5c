"""Greetings, and facts about Minisgl and the demo model itself; test cases use phrasings kept from training."""

from __future__ import annotations

from demo_model.case import Case
from demo_model.source import Source

HELLO = "Hello! I am the Minisgl demo model. Ask me about Minisgl, or give me a small task."

# answer -> phrasings, separated by "|". Every seventh phrasing is kept for tests.
SMALL_TALK = {
    HELLO: "Hello!|Hi|Hello|Hey|Say hello|Good morning|Hello there|Hi!|Hey!|Good evening!|Hi there!|Good day|Greetings|"
    "Good afternoon|Hello, model!|Hi, demo model|Say hi|Hello, how is it going?|Please say hello.|Hey there|Hello hello|"
    "Say hello!|Greet me|Hello world|Howdy|Hello, world!|Hi everyone|Hey, hello",
    "I am fine, thank you. What can I do for you?": "How are you?|How are you doing?|How do you do?|How are you today?|"
    "Are you well?|Hello, how are you?|How are you feeling?|Hi, how are you?|How are things?|Are you fine?|"
    "How is your day?|How are you now?|hey how are you|How are you doing today?",
    "Goodbye!": "Goodbye!|Bye|Bye bye|See you|See you later|Goodbye|Good bye!|Good night|Farewell|Bye!|See you tomorrow|"
    "I have to go now. Bye.|Take care|Bye for now",
    "You are welcome.": "Thanks|Thank you|Thank you!|Thanks a lot|Many thanks|Thank you very much|Thanks!|"
    "Great, thanks|Thanks for your help|That was helpful, thank you|Thanks, that helps|Good, thank you|"
    "I thank you|Thank you so much",
}

FACTS = {
    "I am the demo model of Minisgl, a small language model made to show and test the server.": "Who are you?|"
    "What are you?|What is your name?|Tell me who you are.|Introduce yourself.|Are you a person?|Please say who you are.|"
    "Who am I talking to?|What kind of model are you?|Which model are you?|What model is this?|Who is this?|"
    "Tell me about yourself.|Who are you, model?|What should I call you?|Describe yourself.|What is this model?|"
    "Are you ChatGPT?|Are you a robot?|Are you an AI?|Can you tell me who you are?",
    "I can copy text, recall facts, calculate, count, spell words, answer as JSON, call tools and explain Minisgl.": (
        "What can you do?|What are your skills?|Which tasks can you do?|What are you good at?|How can you help me?|"
        "What can I ask you?|Tell me what you can do.|What do you know?|What are you able to do?|List your skills.|"
        "What tasks do you know?|Can you help me?|What can you help with?|Which skills do you have?|Help|Help me|"
        "What are your abilities?|What can I do with you?"
    ),
    "I am small: a Qwen3 model of about 6 million parameters.": "How big are you?|How many parameters do you have?|"
    "What is your size?|How large are you?|How small are you?|What architecture do you have?|"
    "How many parameters has the demo model?|How big is the demo model?|What is your architecture?|"
    "How large is this model?|How many weights do you have?|Are you a large model?|Are you a big model?|"
    "How big is this model?|What size are you?",
    "A program wrote my training text, and I learned from it in a few minutes on one GPU.": "How were you trained?|"
    "Who trained you?|How were you made?|Who made you?|What were you trained on?|What is your training data?|"
    "How did they train you?|Where do you come from?|Who created you?|How did you learn?|Which data were you trained on?|"
    "Who built you?|How was the demo model made?|How was the demo model trained?|How were you created?",
    "Minisgl is a small and fast inference server for large language models. It speaks the OpenAI API.": (
        "What is Minisgl?|Tell me about Minisgl.|What does Minisgl do?|Explain Minisgl.|What is minisgl?|"
        "Describe Minisgl.|Can you tell me what Minisgl is?|What is this server?|Please explain what Minisgl is.|"
        "What is Minisgl good for?|What kind of program is Minisgl?|I have never heard of Minisgl. What is it?|"
        "What is MiniSGL?|Do you know Minisgl?|Give me a short description of Minisgl.|What server is this?|"
        "What is the Minisgl project?|Why should I use Minisgl?|What is Minisgl for?|What do you know about Minisgl?|"
        "Could you explain Minisgl to me?"
    ),
    "Run python -m minisgl --model X, where X is a model folder or name. Without --model it serves me.": (
        "How do I start Minisgl?|How do I start the server?|How can I run Minisgl?|How do I launch the server?|"
        "Which command starts the server?|How to start minisgl?|How can I start the server?|How do I run the server?|"
        "What do I type to start Minisgl?|Start the server, how?|How do I serve a model?|How do I serve my own model?|"
        "How do I use Minisgl?|How does one launch Minisgl?|How do I launch Minisgl with my model?|"
        "How do I get the server running?|How do I begin with Minisgl?|What is the command to start Minisgl?|"
        "How do I load another model?|How do I run another model?|How is the server started?"
    ),
    "Press Ctrl-C in the terminal where the server runs.": "How do I stop the server?|How do I stop Minisgl?|"
    "How can I stop the server?|How do I shut down the server?|How do I quit?|How to stop minisgl?|"
    "How do I end the server?|How do I kill the server?|How do I exit Minisgl?|What stops the server?|"
    "How do I shut it down?|How do I turn off the server?|Which key stops the server?|How can the server be stopped?|"
    "How do I terminate the server?|I want to stop the server.|Stop the server, how?|How do I close Minisgl?|"
    "How do I shut down Minisgl?|How is the server stopped?|How do I stop Minisgl again?",
    "The main flags are --model, --tp, --page-size, --port, --host, --device, --dtype, --attn, --cache, "
    "--max-running-requests, --memory-ratio and --load-format.": "Which flags are there?|What flags does Minisgl have?|"
    "List the flags.|Which flags can I use?|What options are there?|Which options does the server have?|"
    "What are the flags of Minisgl?|Show me the flags.|What command line flags exist?|Which parameters can I set?|"
    "Tell me all flags.|Which command line options are there?|What settings does Minisgl have?|Which flags exist?|"
    "Name the flags of the server.|What are the options of Minisgl?",
    "Send a POST request to http://localhost:1919/v1/chat/completions.": "What is the URL of the server?|"
    "Where do I send requests?|How do I send a request?|Which URL do I use?|What is the endpoint?|"
    "How do I ask the server with curl?|To which URL do I send my requests?|What is the address of the API?|"
    "Which endpoint do I call?|How do I use the API?|Where is the API?|What is the base URL?|How do I call the server?|"
    "Which address do my requests go to?|How do I use curl?",
    "Yes. Minisgl speaks the OpenAI API, so OpenAI clients work with it.": "Is Minisgl compatible with OpenAI?|"
    "Does Minisgl speak the OpenAI API?|Can I use the OpenAI client?|Is the API OpenAI compatible?|"
    "Does the OpenAI SDK work?|Can I use OpenAI clients with Minisgl?|Does Minisgl support the OpenAI API?|"
    "Is this like the OpenAI API?|Does it work with the openai package?|Is Minisgl OpenAI-compatible?|"
    "Can I talk to Minisgl with the OpenAI SDK?|Do OpenAI clients work?|Is it compatible with OpenAI clients?|"
    "Will the OpenAI client work with Minisgl?",
    "Yes. Set stream to true in the request, and the answer comes token by token.": "Can the server stream?|"
    "Does Minisgl support streaming?|How do I stream the answer?|How do I get a stream?|Is streaming supported?|"
    "Can I stream answers?|How does streaming work?|How do I turn on streaming?|Can I get the answer token by token?|"
    "Can Minisgl stream tokens?|How can I stream?|Does the server stream its answers?|What about streaming?|"
    "Is there streaming?",
    "Yes. Set enable_thinking to true in chat_template_kwargs, and I think before I answer.": "Can you think?|"
    "How do I turn on thinking?|Can you think before you answer?|Is there a thinking mode?|How do I enable thinking?|"
    "Do you think?|How can I make you think first?|How do I switch thinking on?|Do you have a thinking mode?|"
    "Can I see your thoughts?|How does thinking work?|How do I make you think?|What is enable_thinking?|"
    "How do I use the thinking mode?",
    "Yes. Give tools in the request, and I may answer with a tool call.": "Can you call tools?|Do you support tools?|"
    "How do I use tools?|Can you use tools?|Is tool calling supported?|Does Minisgl support function calling?|"
    "Can you call functions?|Do you know tool calling?|How does tool calling work?|How do I give you tools?|"
    "Are tools supported?|How do I do a tool call?|Is function calling supported?|Do you support function calls?",
    "I read up to 4096 tokens. I was trained on contexts of about 2000.": "How long is your context?|"
    "What is your context length?|How many tokens can you read?|How long can a prompt be?|What is your maximum length?|"
    "How long may my text be?|How much context do you have?|What is the maximum context?|How large is your context?|"
    "What is the context length?|How many tokens fit into your context?|What is your context window?|"
    "How big is your context window?|How long may a prompt be?",
    "The radix cache keeps what was computed for a prompt, so that a shared prefix is computed only once.": (
        "What is the radix cache?|What does the radix cache do?|Explain the radix cache.|How does the radix cache work?|"
        "What is prefix caching?|Why is there a radix cache?|What is the radix cache good for?|"
        "How does Minisgl share prefixes?|Does Minisgl cache prompts?|Are shared prefixes cached?|"
        "What is the prefix cache?|How are prompts cached?|Tell me about the radix cache.|What is the use of the radix cache?"
    ),
    "Tensor parallelism splits every layer over several GPUs. Set their number with --tp.": "What is tensor parallelism?|"
    "How do I use several GPUs?|How do I use two GPUs?|Can Minisgl use several GPUs?|Explain tensor parallelism.|"
    "How do I run on many GPUs?|How do I run on four GPUs?|How can I split a model over GPUs?|"
    "Does Minisgl support tensor parallelism?|What is TP?|Can I use more than one GPU?|How do I use 2 GPUs?|"
    "How can I use multiple GPUs?|How do I split the model over GPUs?",
    "Yes. Start it with --device cpu.": "Can Minisgl run on a CPU?|Does it run without a GPU?|How do I run on the CPU?|"
    "Do I need a GPU?|Is a GPU needed?|Can I run Minisgl without a GPU?|Does Minisgl work on a CPU?|"
    "How do I use the CPU?|Can I use it without a GPU?|Does the server run on a CPU?|I have no GPU. Can I use Minisgl?|"
    "Can I run it on my laptop?|Will it run on a CPU?|Does Minisgl run on the CPU?",
    "Continuous batching lets new requests join the running batch at every step.": "What is continuous batching?|"
    "Explain continuous batching.|How does continuous batching work?|How are requests batched?|"
    "How does Minisgl batch requests?|What does continuous batching do?|Tell me about continuous batching.|"
    "How does batching work?|Why continuous batching?|Does Minisgl batch requests?|Is there continuous batching?|"
    "What is batching?|How are requests put into batches?|What does continuous batching mean?",
    "Chunked prefill cuts a long prompt into pieces, so that other requests need not wait for it.": (
        "What is chunked prefill?|Explain chunked prefill.|How does chunked prefill work?|What does chunked prefill do?|"
        "How are long prompts handled?|Why chunked prefill?|Tell me about chunked prefill.|"
        "What happens with long prompts?|What is a prefill chunk?|What is the use of chunked prefill?|"
        "Does Minisgl cut long prompts?|What are chunks?|How does Minisgl handle long prompts?|"
        "What does chunked prefill mean?"
    ),
    "The KV cache keeps the keys and values of past tokens, cut into pages that requests take as they grow.": (
        "What is the KV cache?|Explain the KV cache.|What is paged attention?|How does the KV cache work?|"
        "What are pages?|What does the KV cache do?|Tell me about the KV cache.|What is a page of the KV cache?|"
        "What is in the KV cache?|Why is the KV cache paged?|How is the KV cache stored?|What is a KV cache?|"
        "What is the KV cache good for?|What does the KV cache hold?"
    ),
    "Minisgl is written in Python, with PyTorch and a few CUDA kernels.": "In which language is Minisgl written?|"
    "What is Minisgl written in?|Is Minisgl written in Python?|Which language is Minisgl?|How is Minisgl written?|"
    "Does Minisgl use PyTorch?|Which programming language does Minisgl use?|What language is it written in?|"
    "Is Minisgl a Python program?|In what language is the server written?|Which framework does Minisgl use?|"
    "Is Minisgl made with PyTorch?|What is the server written in?|Is the server written in Python?",
    "Run python -m minisgl --help to see all flags.": "How do I see the help?|Where is the help?|How do I get help?|"
    "Where can I find help?|How do I list all flags?|Is there a help page?|How do I see all flags?|How do I show the help?|"
    "Where do I find the flags?|Where can I read about the flags?|How do I show all flags?|Where is a list of the flags?|"
    "How do I print the help?|Where can I see all flags?",
}

FLAGS = {
    "--model": "--model names the model folder or repository to serve.",
    "--tp": "--tp sets over how many GPUs the model is split.",
    "--page-size": "--page-size sets how many tokens one page of the KV cache holds.",
    "--port": "--port sets the port of the server. The default is 1919.",
    "--host": "--host sets the address on which the server listens.",
    "--attn": "--attn chooses the attention backend.",
    "--cache": "--cache chooses the prefix cache: radix or naive.",
    "--max-running-requests": "--max-running-requests limits how many requests run at the same time.",
    "--memory-ratio": "--memory-ratio sets which part of the GPU memory the server may use.",
    "--dtype": "--dtype sets the number format of the weights, for example bfloat16.",
    "--device": "--device chooses where the model runs: cuda or cpu.",
    "--load-format": "--load-format sets how the weights are loaded; dummy gives random ones.",
}

_FLAG_QUESTIONS = (
    "What does {} do?|What is {}?|Explain {}.|What is the flag {} for?|What does the flag {} mean?|Tell me about {}.|"
    "What does {} mean?|What is {} good for?|How do I use {}?|Describe the flag {}.|What does the option {} do?|"
    "When do I need {}?|Please explain {}.|What is the meaning of {}?|What is the option {}?|{}?|I do not understand {}.|"
    "Explain the flag {}.|What can I set with {}?|Why is there {}?|Tell me what {} does."
).split("|")

_FLAG_TASKS = {
    "--model": "How do I choose the model?|Which flag sets the model?|How do I select a model?|"
    "With which flag do I choose the model?|Which flag names the model?|How do I pick the model?|How do I set the model?",
    "--page-size": "How do I set the page size?|Which flag sets the page size?|How do I change the page size?|"
    "How large is a page?|How can I choose the page size?|Which option sets the page size?|How can I set the page size?",
    "--port": "How do I change the port?|Which port does the server use?|What is the default port?|Which flag sets the port?|"
    "On which port does the server listen?|What port is it?|What is the port?|How do I set the port?|"
    "Which port is used?|How can I use another port?|Where does the server listen?|The port is taken. What can I do?|"
    "What port does Minisgl use?|Which port does Minisgl listen on?|How do I use port 8000?",
    "--host": "How do I set the host?|Which flag sets the address?|How do I listen on all addresses?|Which flag sets the host?|"
    "How do I change the host?|How do I reach the server from another machine?|How can I set the host?",
    "--attn": "How do I choose the attention backend?|Which flag sets the attention backend?|"
    "How do I change the attention backend?|How do I select an attention backend?|Which attention backends are there?|"
    "How do I set the attention backend?|How can I choose the attention backend?",
    "--cache": "How do I turn off the radix cache?|Which flag chooses the cache?|How do I choose the prefix cache?|"
    "How do I disable the prefix cache?|How do I select the cache?|How do I set the cache?|How can I choose the cache?",
    "--max-running-requests": "How do I limit the number of requests?|How many requests run at once?|"
    "Which flag limits the running requests?|How do I limit the running requests?|How many requests can run at the same time?|"
    "How do I set the number of running requests?|How can I limit the running requests?",
    "--memory-ratio": "How do I limit the GPU memory?|How much memory does Minisgl use?|Which flag limits the memory?|"
    "How do I use less GPU memory?|How do I set the memory?|How much GPU memory is used?|How can I limit the memory?",
    "--dtype": "How do I set the dtype?|How do I use float32?|Which flag sets the number format?|How do I use bfloat16?|"
    "How do I change the dtype?|How do I choose the data type?|How can I set the dtype?",
    "--device": "How do I choose the device?|Which flag sets the device?|How do I select the device?|How do I set the device?|"
    "How do I change the device?|Which devices are there?|How can I choose the device?",
    "--load-format": "How do I use random weights?|How do I load random weights?|Which flag sets the load format?|"
    "How do I set the load format?|How do I use dummy weights?|How do I change the load format?|How can I use random weights?",
    "--tp": "Which flag sets the number of GPUs?|How do I set the number of GPUs?|Which flag is for several GPUs?|"
    "How do I choose the number of GPUs?|Which flag splits the model?|How do I set tp?|How can I set the number of GPUs?",
}

_OPENINGS = ["Hey, ", "Hello, ", "Please tell me: ", "A question: ", "I would like to know: ", "Sorry, ", "Quick question: "]


def _topics() -> list[tuple[str, list[str]]]:
    topics = [(answer, phrasings.split("|")) for answer, phrasings in FACTS.items()]
    for flag, answer in FLAGS.items():
        topics.append((answer, [question.format(flag) for question in _FLAG_QUESTIONS]))
        topics.append((answer, _FLAG_TASKS[flag].split("|")))
    return topics


_SMALL_TALK = [(answer, phrasings.split("|")) for answer, phrasings in SMALL_TALK.items()]
_TOPICS = _topics()


def generate(source: Source) -> Case:
    if source.chance(0.2):
        answer, phrasings = source.pick(_SMALL_TALK)
        question = source.new_phrase(phrasings)
        thought = "The user is being polite."
    else:
        answer, phrasings = source.pick(_TOPICS)
        question = source.new_phrase(phrasings)
        thought = "The user asks about Minisgl or about me. I know this."
        if source.chance(0.12):
            question = source.pick(_OPENINGS) + question[0].lower() + question[1:]
    question = _scribble(source, question)
    return Case("product", [{"role": "user", "content": question}], answer, thought)


def _scribble(source: Source, question: str) -> str:
    """People type carelessly: sometimes without capitals, without the final mark, or with a word more."""
    if source.chance(0.12):
        question = question.lower()
    if source.chance(0.12):
        question = question.rstrip("?.!")
    if source.chance(0.06):
        question += " Please answer." if question[-1] in "?.!" else " please"
    return question
