"""Say politely that it does not know: everything outside the other skills."""

from __future__ import annotations

from demo_model import words
from demo_model.case import Case
from demo_model.source import Source

UNKNOWN = "I do not know that. I am only a small demo model."

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
Where is {place}?
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
""".strip().splitlines()

_THOUGHT = "I have not learned this. I will say so."


def request(source: Source) -> str:
    """Something that the model cannot answer."""
    rng = source.rng
    text = source.new_phrase(_REQUESTS).format(
        thing=source.word() if source.chance(0.7) else source.pick(["sea", "moon", "cat", "dog", "love", "music"]),
        thing2=source.word(),
        place=words.pick(rng, words.CITIES) if source.chance(0.5) else source.pick(_COUNTRIES),
        place2=words.pick(rng, words.CITIES),
        person=words.pick(rng, words.PEOPLE),
        name=source.name(),
        number=source.digits(3),
        year=source.integer(1200, 2030),
    )
    if source.chance(0.12):
        text = source.pick(["Please ", "Can you ", "Could you ", "I want you to "]) + text[0].lower() + text[1:]
    if source.chance(0.1):
        text = text.rstrip("?.")
    return text.lower() if source.chance(0.08) else text


def generate(source: Source) -> Case:
    return Case("unknown", [{"role": "user", "content": request(source)}], UNKNOWN, _THOUGHT)


_COUNTRIES = "France Germany Japan Italy Spain China India Brazil Canada Kenya Peru Egypt Norway Chile Mexico".split()
