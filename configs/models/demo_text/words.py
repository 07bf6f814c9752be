"""Word lists of the tale grammar, most likely first.

The order matters: `grammar.pick` prefers the front of a list, so that a trained model has a
clear favourite at every branch and greedy decoding meets no near ties.
"""

# ruff: noqa: SIM905 - a list of words is easier to read and to edit as one string
from __future__ import annotations

__all__ = [
    "ADVICE",
    "ENDINGS",
    "FAVOURS",
    "GIFTS",
    "HELPERS",
    "HEROES",
    "MORALS",
    "NAMES",
    "OBJECTS",
    "PLACES",
    "ROADS",
    "SEASONS",
    "TRAITS",
    "WEATHER",
    "WORRIES",
]

NAMES = {
    "she": (
        "Mira Anna Elsa Nora Lena Ruth Clara Ida Tilda Greta Maren Alma Rosa Vera Edith Wilma "
        "Hanna Stella Flora Agnes Ingrid Petra Lucy Emma Jane Fanny Sophie Olive Hazel Juno"
    ).split(),
    "he": (
        "Tom Jonas Peter Emil Anton Felix Hugo Oskar Karl Martin Simon Otto Paul Jacob Henry "
        "Arthur Edmund Walter Robin Silas Theo Victor Basil Caspar Linus Ned Piet Rufus Sam Will"
    ).split(),
}

HEROES = (
    "fisherman clockmaker baker sailor gardener miller shepherd weaver fox lighthouse_keeper "
    "blacksmith carpenter potter tailor doctor teacher painter hunter ferryman bell_ringer "
    "hare badger bear owl cat dog mouse crow goose hedgehog otter wolf squirrel horse "
    "princess king queen prince knight soldier wizard giant robot dragon captain pilot girl boy "
    "merchant beekeeper postman cook musician miner nurse astronaut librarian glassblower "
    "actor understudy engineer watchman stonemason shoemaker farmer student poet pirate ghost"
).split()

TRAITS = (
    "patient curious quiet careful cheerful stubborn clever kind brave gentle honest restless "
    "thoughtful shy merry humble absent-minded hard-working good-natured sharp-eyed lonely proud"
).split()

PLACES = (
    "a small town by the sea|a village at the foot of the mountains|an old mill beside the river|"
    "a house at the edge of the forest|a cove where the wind never slept|"
    "a narrow street behind the market|a valley full of apple trees|a castle on a grey hill|"
    "a cottage at the end of a long road|a harbour full of red boats|a city with seven bridges|"
    "a hut beside a frozen lake|a garden behind a high wall|a lighthouse on a lonely rock|"
    "a hollow under the roots of an oak|a tower above the clouds|a desert of yellow stone|"
    "a theatre with a velvet curtain|a library without windows|a station at the end of the line"
).split("|")

OBJECTS = (
    "lantern bell key map clock ring compass book kettle violin boat mirror letter coin cloak "
    "crown candle ladder basket flute drum needle seed stone feather telescope wheel hammer "
    "teapot umbrella anchor shell wagon kite saddle window door blanket spoon hat star button "
    "machine engine lamp rope sail bridge notebook pearl sword shield apple cake garden tree"
).split()

SEASONS = (
    "one morning in early spring|one evening in autumn|on the first day of winter|"
    "in the middle of a long summer|one night when the moon was thin|on a Sunday after the rain|"
    "at the end of a dry year|on the shortest day of the year|one market day|just before harvest"
).split("|")

WEATHER = (
    "The wind came from the sea and smelled of salt|A soft rain began to fall|"
    "The sky was clear and full of stars|Fog lay over the fields|"
    "The sun stood low and the shadows were long|Snow had covered the path|"
    "It was so still that one could hear the grass|Clouds hurried over the hills|"
    "Thunder was walking about far away|The air was warm and full of bees|"
    "A cold light lay on the water|The first leaves were falling"
).split("|")

WORRIES = (
    "the {object} was gone|the {object} lay broken on the floor|"
    "the {object} had stopped working in the night|somebody had taken the {object}|"
    "the {object} had lost its colour|the {object} would not move any more|"
    "there was only an empty place where the {object} had been|the {object} made no sound at all|"
    "the {object} had sunk to the bottom of the water|the {object} belonged to somebody else now"
).split("|")

HELPERS = (
    "an old woman with a basket of eggs|a heron standing on one leg|a boy who sold matches|"
    "a tinker with a blue cart|a toad as big as a loaf of bread|a widow who kept bees|"
    "a soldier on his way home|a fox with one white paw|a child who was counting clouds|"
    "a blind man playing the fiddle|a goat tied to a gate|a washerwoman at the river|"
    "a scholar who had lost his spectacles|an owl in a hollow tree|a sister who always agreed|"
    "a carter whose wheel was stuck|a monk with muddy shoes|a snail in no hurry|"
    "a girl herding geese|a ferryman asleep in his boat|a travelling actor without a stage|"
    "a gravedigger who liked jokes|a donkey carrying books|a cook without a kitchen|"
    "a very small giant|a hen who gave orders|a surveyor measuring the road|a retired pirate|"
    "a spider mending its web|a postman with one last letter"
).split("|")

FAVOURS = (
    "shared {his} bread|carried the heavy load up the hill|held the lamp while the work was done|"
    "listened to the whole story without yawning|mended the broken strap|"
    "drew a bucket of water from the well|found what had rolled under the hedge|"
    "sang a song from home|wrote down a letter, word for word|pulled the thorn out with care|"
    "sat and kept watch until the moon rose|gathered dry wood for the fire|"
    "told the truth, though it was not pleasant|gave away {his} second pair of gloves|"
    "waited until the rain had passed|counted everything twice, and found the mistake"
).split("|")

GIFTS = (
    "a ball of red thread|a small silver whistle|a bag of dry peas|a candle end|"
    "a piece of chalk|a walnut that rattled|a rusty nail|a feather from a white goose|"
    "a pocket knife without a point|a glass marble|a jar of honey|a crooked stick|"
    "a scrap of blue cloth|a copper coin with a hole|a key that fitted nothing|a pinch of salt|"
    "a warm potato|a page torn from an almanac|a bell no bigger than a thimble|a smooth stone"
).split("|")

ADVICE = (
    "Go straight on until the road forgets its name|Never answer the first question|"
    "Whoever waits well has already half arrived|What is lost by night is found by day|"
    "Do not look back at the bridge|Ask the water, for it has been everywhere|"
    "Keep to the left where the path divides|Two can carry what one cannot lift|"
    "When one hand lets go, another must already hold|Trust the one who says little|"
    "Knock three times, and then once more|The smallest door is never locked|"
    "Count your steps, and you will not be afraid|Begin again where you stopped, not where "
    "you began"
).split("|")

ROADS = (
    "The road went down through a wood of birches|The path climbed between grey rocks|"
    "For a whole day there was nothing but heather|Then the way led along the river|"
    "A bridge of old planks crossed the gorge|Beyond the last houses the fields began|"
    "The track grew narrow and full of roots|Behind the hill lay a wide marsh|"
    "Towards noon a village came in sight|The coast bent to the north there|"
    "After the crossroads the wood grew thick|The road was white with dust|"
    "There was a long flight of steps, cut into the stone|At the toll house nobody was awake|"
    "The snow reached up to the knee|Under the vines it was cool and green"
).split("|")

MORALS = (
    "what is shared is not lost|a small light is enough, if it is carried on|"
    "patience opens more doors than force|nobody is too small to take over|"
    "the longest way is made of short steps|a promise is worth more than a plan|"
    "good neighbours are better than high walls|one should always know who comes next|"
    "a thing well kept will keep you|even a broken thing may be of use"
).split("|")

ENDINGS = (
    "And if nobody has moved it, the {object} is there to this day|"
    "And that is the whole story, from the first word to the last|"
    "After that {name} slept well, and so did everybody else|"
    "People still tell it there, when the evenings grow long|"
    "And when {name} grew old, another took {his} place, and nothing was forgotten|"
    "The rest is quiet, as the rest should be|"
    "And from that day on there were always two of everything, to be safe"
).split("|")
