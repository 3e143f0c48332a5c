"""Words and sentences out of nothing: real words, made-up words and filler text."""

from __future__ import annotations

import random


def _listed(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


COMMON = _listed("""
able acid actor air alarm album amber angle ankle apple april apron arch arm arrow art ash atlas autumn avenue
axis baby back bacon badge bag baker ball bamboo banana band bank bar barn basil basket bath beach bean bear
beaver bed bee beetle bell belt bench berry bike bird bishop blade blanket block blossom blue boat bone book boot
border bottle bowl box boy branch brass bread breeze brick bridge broom brother brown brush bucket bus butter
button cabin cable cactus cake camel camera camp canal candle candy canoe canyon cap captain car card carpet
carrot cart castle cat cave cedar cellar chain chair chalk cheese cherry chess chest chicken child chimney church
cider circle city clay cliff clock cloud clover coach coal coast coat cobalt coffee coin comet compass copper coral
cork corn cotton couch cousin cow crab cradle crane cream creek cricket crow crown crystal cup curtain daisy dance
dawn deck deer desert desk diamond dinner doctor dog dollar dolphin donkey door dove dragon drawer dress drum duck
dust eagle earth echo egg elbow elm ember engine evening eye fabric falcon family farm father feather fence fern
ferry field fig finger fire fish flag flame flower flute fog forest fork fox frame friend frog frost fruit garden
garlic gate ghost giant ginger glass globe glove goat gold goose grain grape grass gravel green grove guitar hall
hammer hand harbor harp hat hawk hazel heart hedge helmet heron hill hive holly honey hood horn horse hotel house
ice igloo ink insect iris iron island ivory ivy jacket jaguar jar jasmine jelly jewel judge jungle kettle key king
kitchen kite kitten knee knife knot ladder lady lake lamp lantern lark laser lava lawn leaf leather lemon letter
lily lime linen lion lizard lobster lock log lotus lunch lynx magnet maple marble market mask meadow medal melon
metal milk mill mint mirror money monkey moon morning moss mother motor mountain mouse museum music nail needle
nest night north nurse oak oasis ocean olive onion opal orange orbit orchid otter oven owl oyster paddle page
paint palace palm panda paper park parrot path peach pear pearl pebble pencil pepper piano pigeon pillow pilot pine
pirate planet plate plum pocket pond pony poppy potato prince pumpkin purple puzzle queen quilt rabbit radio rain
raven red ribbon rice ring river road robin rocket roof room root rope rose ruby saddle sail salmon salt sand
saturn scarf school sea shadow shark sheep shell ship shoe silk silver sister sky snail snow soap sofa soup south
spider spoon spring star stone storm strawberry street sugar summer sun swan table tea temple thunder ticket tiger
tower town train tree tulip tunnel turtle uncle valley velvet village violin wagon walnut water wave whale wheat
wheel willow wind window winter wolf wood wool yellow zebra
""")

CITIES = _listed("""
Amsterdam Athens Berlin Boston Cairo Chicago Delhi Dublin Geneva Hamburg Helsinki Istanbul Kyoto Lima Lisbon London
Madrid Milan Montreal Moscow Munich Nairobi Oslo Paris Prague Rome Seattle Seoul Shanghai Sydney Tokyo Toronto
Vienna Warsaw Zurich
""")

PEOPLE = _listed("""
Adam Alice Anna Ben Bob Carla Carol Clara Daniel David Diana Emma Eric Eva Frank Grace Hanna Henry Ida Ivan Jack Jane
John Julia Karl Kate Laura Leo Lucy Maria Mark Mia Nina Nora Oscar Paul Peter Rosa Sam Sara Sophie Tim Tom Victor Zoe
""")

COLORS = _listed("red blue green yellow black white orange purple brown pink gray gold silver violet turquoise")

_ONSETS = _listed(
    "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr qu sc sh sl sn sp st str th tr tw"
)
_VOWELS = _listed("a a e e i i o o u ai ea ee ie oa oo ou y")
_CODAS = ["", "", "", *_listed("b d g k l m n p r s t x ck ld ll mp nd ng nk nt rd rk rm rn rt sh sk ss st")]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_PLACES = _listed("by the river;in the old town;near the harbor;behind the mill;under the bridge;on the hill", ";")
_TIMES = _listed("before noon;in the evening;every morning;last winter;for a while;once a year;at night", ";")
_VERBS = _listed("saw found carried painted followed liked counted sold left watched cleaned moved")
_ADJECTIVES = _listed("small old quiet green heavy bright cold round strange gentle broken early empty soft")


def pick(rng: random.Random, items: list[str]) -> str:
    return items[int(rng.random() * len(items))]


def any_word(rng: random.Random) -> str:
    """A real word (4 in 10), a pronounceable one (4 in 10) or random letters; 3 to 10 letters."""
    kind = rng.random()
    if kind < 0.4:
        return pick(rng, COMMON)
    if kind < 0.8:
        return _pronounceable(rng)
    return "".join(_LETTERS[int(rng.random() * 26)] for _ in range(3 + int(rng.random() * 6)))


def _pronounceable(rng: random.Random) -> str:
    while True:
        syllables = 1 + int(rng.random() * 3)
        word = "".join(pick(rng, _ONSETS) + pick(rng, _VOWELS) + pick(rng, _CODAS) for _ in range(syllables))
        if 3 <= len(word) <= 10:
            return word


def sentence(rng: random.Random) -> str:
    """One filler sentence."""
    subject = f"{pick(rng, _ADJECTIVES)} {any_word(rng)}"
    thing = f"{pick(rng, _ADJECTIVES)} {any_word(rng)}"
    kind = int(rng.random() * 5)
    if kind == 0:
        return f"The {subject} {pick(rng, _VERBS)} the {thing} {pick(rng, _PLACES)}."
    if kind == 1:
        return f"{pick(rng, PEOPLE)} {pick(rng, _VERBS)} a {thing} {pick(rng, _TIMES)}."
    if kind == 2:
        return f"There was a {thing} {pick(rng, _PLACES)}."
    if kind == 3:
        return f"{pick(rng, _TIMES).capitalize()} the {subject} was {pick(rng, _PLACES)}."
    return f"{pick(rng, PEOPLE)} and {pick(rng, PEOPLE)} {pick(rng, _VERBS)} the {subject}."


def filler(rng: random.Random, length: int) -> str:
    """Filler sentences of about `length` characters in all, at least one."""
    sentences = [sentence(rng)]
    size = len(sentences[0])
    while size < length:
        sentences.append(sentence(rng))
        size += len(sentences[-1]) + 1
    return " ".join(sentences)
