"""Say politely that it does not know: everything outside the other skills."""

from __future__ import annotations

from demo_model import words
from demo_model.case import Case
from demo_model.skills import recall
from demo_model.source import Source, capitalized, choices

UNKNOWN = "I do not know that. I am only a small demo model."

# Requests as people make them. Of every seven the last is kept for tests.
_REQUESTS = """
Write a haiku about the {thing}.
What is the capital of {place}?
Who wrote {name}?
Tell me a joke.
Tell me a joke about a {thing}.
Write a poem about {thing}.
How far is {place} from {place2}?
Who won the world cup in {year}?
What is the meaning of life?
Explain quantum mechanics.
Write a story about a {thing}.
How do I cook {thing}?
What is the weather in {place}?
Who is the president of {place}?
What is the population of {place}?
When was {person} born?
Translate {thing} into French.
Write a short poem about the {thing} and the {thing2}.
Why is the sky blue?
What is the best {thing}?
How many people live in {place}?
Who invented the {thing}?
What is the square root of {number}?
Write a song about {place}.
What happened in {year}?
Who is {person} {name}?
What should I eat today?
Can you recommend a book about {thing}?
Summarize the history of {place}.
Write a Python program that sorts a list.
Write a function that finds the {thing}.
How does a {thing} work?
What is a {thing}?
Why do {thing}s like {thing2}s?
Where is {place} on the map?
What language do they speak in {place}?
How old is {person} {name}?
Give me advice about {thing}s.
What time is it?
What is the date today?
Describe the {thing}.
Which is better, a {thing} or a {thing2}?
How do I fix my {thing}?
What is the color of the {thing}?
Plan a trip to {place}.
What is the plot of {name}?
Write an email to {person} about the {thing}.
How much does a {thing} cost?
Who was the first person on the moon?
What is the largest {thing} in the world?
How tall is {person}?
Where can I buy a {thing}?
What do you think about {thing}s?
Do you like {thing}?
Do you love me?
Is there life on Mars?
What is love?
Is {place} bigger than {place2}?
Draw a {thing}.
Sing a song.
Play a game with me.
Tell me something about {thing}s.
Tell me a story.
Tell me a fact about {place}.
Give me a recipe for {thing} soup.
How do I learn {name}?
What is the speed of light?
How many {thing}s are in {place}?
Who painted the {thing}?
What is the chemical formula of {thing}?
Explain how {thing}s are made.
Explain the theory of relativity.
When did the war end?
What are the news?
What is the stock price of {name}?
Is a {thing} a {thing2}?
Can a {thing} fly?
How can I become a {thing}?
What does {name} mean?
Compare {place} and {place2}.
Make a list of {thing}s.
Solve the equation of {name}.
Prove that there are infinitely many primes.
What is your favorite {thing}?
Which {thing} do you like best?
What did {person} do in {year}?
Write an essay about {thing}.
Write a limerick about a {thing}.
Write a letter to my {thing}.
Write three sentences about {place}.
How do birds fly?
How deep is the ocean?
Where does the {thing} come from?
Why is the {thing} so {thing2}?
Book a flight to {place}.
Send a message to {person}.
Find a hotel in {place}.
Remind me to call {person}.
Turn on the {thing}.
Order a {thing} for me.
Search for {thing}s in {place}.
Name three {thing}s.
Name a famous {thing}.
Give me five ideas for a {thing}.
Who discovered {place}?
Should I buy a {thing}?
{thing} {thing2}
{name}
{thing} {thing2} {thing}
Once upon a time
What is your favorite {thing2}, and why?
Do you have a {thing}?
Remind me about the {thing}.
Remind me to buy a {thing}.
Do you know {person} {name}?
Are there {thing}s on the moon?
""".strip().splitlines()

# Requests put together from parts, to meet most of what nobody has thought of.
_ORDERS = [
    choices(
        "write|compose|draw|make|create|build|sing|design|invent|plan|prepare|paint|give me|tell me|"
        "show me|find|buy|send|fetch|recommend|describe|explain|summarize|translate|improve|review|open|"
        "close|cook|order|book|help me with|remind me of|teach me|let us discuss|think about|talk about|"
        "suggest|call|turn off|guess"
    ),
    choices(" a| the| my| some| a short| a long| three| a funny| your| this| another| the best| an old| the next"),
    choices(
        " {thing}| {thing}| {thing} {thing2}| poem| story| song| essay| letter| joke| recipe| haiku|"
        " speech| picture| list of {thing}s| book| film| game| report| meeting| trip to {place}| message|"
        " program| article| idea"
    ),
    choices(
        "| about {thing}s| about the {thing}| for {person}| to {person}| in {place}| with a {thing}|"
        " for my {thing2}|| for today| about {place}| in French| as soon as you can| from {place}|"
        " of {year}"
    ),
]
_QUESTIONS = [
    choices(
        "what is|who is|where is|when was|why is|how is|what was|who was|how old is|how big is|how tall is|"
        "is|how expensive is|where was|whose is|since when is|how good is|how heavy is|what about|was"
    ),
    choices(
        " the {thing2} {thing}| {person} {name}| {place}| your favorite {thing}| the best {thing}|"
        " a {thing}| the {thing} in {place}| my {thing}| the first {thing}| the king of {place}| love|"
        " {name}"
    ),
    choices("| in {place}| in {year}| today| now| of the world| next year| so {thing2}| made of {thing2}"),
]
_MATTERS = [
    choices(
        "how do I|how can I|why do people|where can I|when should I|should I|can you|could you|will you|"
        "do you|may I|what happens when I|who can|did {person}|does {person}|can a {thing}|would you|"
        "did you"
    ),
    choices(" paint| cook| repair| buy| find| see| visit| love| grow| eat| like| remember| win| catch| learn about"),
    choices(" a {thing}| the {thing}| {place}| my {thing}| {person}| {thing}s| the {thing2} {thing}| some {thing}s"),
    choices("| in {place}| today| with a {thing2}| next week| at home| for {person}| without {thing}s"),
]

_COUNTRIES = choices("France|Germany|Japan|Italy|Spain|China|India|Brazil|Canada|Kenya|Peru|Egypt|Norway|Chile|Mexico")

_THOUGHT = "I have not learned this. I will say so."


def generate(source: Source) -> Case:
    """Every eighth case asks for something that the conversation could have told, but has not."""
    if source.chance(1 / 8):
        return recall.missing(source)
    return simple(source)


def simple(source: Source) -> Case:
    return Case("unknown", [{"role": "user", "content": _request(source)}], UNKNOWN, _THOUGHT)


def _request(source: Source) -> str:
    kind = source.rng.random()
    if kind < 0.5:
        pattern = source.new_phrase(_REQUESTS)
    else:
        slots, mark = source.pick([(_ORDERS, "."), (_QUESTIONS, "?"), (_MATTERS, "?")])
        pattern = source.new_composition(*slots) + mark
    rng = source.rng
    text = pattern.format(
        thing=source.word() if source.chance(0.7) else source.pick(["sea", "moon", "cat", "dog", "love", "music"]),
        thing2=source.word(),
        place=words.pick(rng, words.CITIES) if source.chance(0.5) else source.pick(_COUNTRIES),
        place2=words.pick(rng, words.CITIES),
        person=words.pick(rng, words.PEOPLE),
        name=source.name(),
        number=source.digits(3),
        year=source.integer(1200, 2030),
    )
    if source.chance(0.1):
        text = (
            source.pick(["please ", "can you ", "could you ", "I want you to ", "hello, "]) + text[0].lower() + text[1:]
        )
    text = capitalized(text)
    if source.chance(0.1):
        text = text.rstrip("?.")
    return text.lower() if source.chance(0.08) else text
