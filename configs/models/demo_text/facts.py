"""What the demo model may know: things, their looks, their use; and answers about itself.

Each thing is one line: name | what it is | what it looks like | what it is for | where it is met |
one more remark. The answers about Understudy are plain sentences, so that a demo can be asked
what it is demonstrating.
"""

# ruff: noqa: E501 - one thing, one line
from __future__ import annotations

__all__ = ["ANSWERS", "THINGS"]

_THINGS = """
lighthouse|a tower with a strong light at the top|tall and white, with a gallery under the lamp|shows ships where the rocks are|on capes and small islands|Its keeper sleeps by day
sea|the great salt water that lies around all land|grey in the morning and blue at noon|carries ships, fish and weather|wherever the land ends|Nobody has ever counted its waves
river|water on its way from the hills to the sea|narrow and loud at first, wide and quiet later|turns mills and feeds the fields|in every valley|It is never the same twice
moon|the companion of the earth|round, pale and marked with grey plains|moves the tides and lights the night|above the roofs, on most nights|It shows us always the same face
sun|the star nearest to us|bright, yellow and too strong to look at|gives light and warmth to everything that grows|in the sky by day|Without it there would be no bread
star|a sun that is very far away|a small clear point|guides sailors and keeps poets busy|in the night sky, far from lamps|Its light is older than we are
mountain|a piece of land that rises far above the rest|steep, grey and often white at the top|catches the clouds and sends down rivers|where two lands once met|The way up is longer than it looks
forest|a wide place full of trees|dark below and green above|gives wood, shade and mushrooms|between the fields and the hills|It answers every call a little late
tree|a plant with a trunk of wood|rough below, with leaves that move in the wind|holds the soil and houses the birds|in gardens, streets and forests|Its age is written inside
garden|a piece of land that somebody cares for|full of beds, paths and bees|feeds the kitchen and rests the eye|behind houses and walls|It is never finished
bridge|a road over water|an arch of stone or a beam of iron|brings people across dry|where two banks want to meet|It belongs to both sides
ship|a large boat that can cross the sea|long, with a high bow and a deep hull|carries people and goods from port to port|in harbours and far out on the water|A good ship has a spare rope for every rope
harbour|a safe place for ships|a ring of walls around still water|keeps storms away from the boats|on the coast, near a town|It smells of tar and fish
clock|a machine that shows the time|a round face with two hands|tells people when to begin and when to stop|on towers, walls and shelves|Two clocks seldom agree
bell|a hollow piece of metal that rings|like a cup turned upside down|calls people together and warns them|in towers and on ships|A cracked bell never sings again
lantern|a lamp that can be carried|a small house of glass with a flame in it|shows the way at night|on boats, carts and doorsteps|It must be trimmed every evening
candle|a stick of wax with a thread in it|straight, pale and soft when warm|gives a small light for an hour or two|on tables and in windows|It can light another and lose nothing
book|many pages bound together|a small box made of paper|keeps words until somebody wants them|on shelves, in bags and beside beds|It can wait for a hundred years
letter|a message on paper|a folded sheet with a name on it|carries news to someone who is away|in boxes, pockets and drawers|The best ones are kept
map|a picture of the land from above|full of lines, names and small signs|helps travellers to find the way|in the bags of those who walk|It is always a little out of date
bread|food made from flour, water and time|brown outside and soft within|feeds people every day|in every bakery, warm in the morning|It tastes best when it is shared
apple|the fruit of the apple tree|round, red or green, with a star of seeds|is eaten raw, baked or pressed|in orchards, in autumn|It keeps all winter in a cool room
tea|a drink made from dry leaves|clear and brown, with steam above it|warms the hands and the talk|in kitchens and on trains|It does not like to be hurried
rain|water that falls from the clouds|grey lines in front of the hills|fills the wells and wakes the seeds|in most places, sooner or later|It falls on everybody alike
snow|rain that has frozen into small stars|white, soft and silent|covers the fields and keeps them warm|on mountains, and everywhere in a hard winter|No two flakes are the same
wind|air that is on its way|not seen, but known by what it moves|fills sails and dries the washing|on hills and coasts|It has no house of its own
cloud|a great many drops of water, floating together|white, grey, or red in the evening|brings rain and shade|high above the fields|It never keeps one shape
fire|heat and light from something that burns|yellow, blue and always moving|cooks, warms and keeps the dark away|in stoves and in camps|It is a good servant
stone|a hard piece of the earth|grey, brown or speckled|builds walls, roads and bridges|in fields, rivers and shoes|It is older than any story
fox|a wild animal with a bushy tail|red, quick and narrow|hunts mice and keeps its own counsel|at the edge of the wood, at dusk|It knows two ways out of every hole
owl|a bird of the night|round, brown and large-eyed|catches mice without a sound|in barns and hollow trees|It can turn its head almost all the way round
cat|a small animal that lives with people when it likes|soft, striped or black, with bright eyes|keeps mice away and laps warm|on sills, walls and the best chair|It comes when it is not called
dog|an animal that has chosen people|large or small, with a wet nose|guards the house and finds the way home|at the door and under the table|It is always glad to see you
horse|a large animal that can run and carry|tall, with a long neck and a mane|pulls carts and carries riders|on farms and on the road|It remembers every path
bee|a small insect that makes honey|brown and gold, with clear wings|visits flowers and fills the hive|in gardens, from spring to autumn|It tells the others where it has been
bird|an animal with feathers and wings|light, quick, and of every colour|sings, flies and eats what is small|in trees, on roofs and over the sea|It sleeps standing up
fish|an animal that lives in water|smooth, with fins and silver scales|swims and feeds half the coast|in rivers, lakes and seas|It never closes its eyes
baker|somebody who makes bread|white to the elbows|feeds the town before it wakes|in a warm room behind the shop|The day of a baker begins at two in the morning
sailor|somebody who works on a ship|brown, steady and used to knots|brings the ship from port to port|on deck, or on the way to it|A sailor looks at the sky first
captain|the one who answers for a ship|calm, with a hand near the wheel|decides where to go, and when to turn back|on the bridge, in good and bad weather|There is only one captain at a time
teacher|somebody who helps others to learn|patient, with chalk on the sleeve|explains things until they are plain|in front of a class|The best question is the one the teacher cannot answer
doctor|somebody who looks after the sick|calm, with cool hands and a bag|finds out what is wrong and what may help|wherever somebody is ill|Often it is enough to listen
musician|somebody who makes music|bent over an instrument|plays so that others may dance or rest|in halls, at fairs and under windows|Silence is also part of the work
violin|an instrument with four strings|a small brown body with a narrow waist|sings when a bow is drawn over it|under the chin of a player|An old one knows more than its owner
theatre|a house where plays are given|rows of seats before a curtain|shows people to themselves|in most towns of some size|Behind the scenes it is always dark
library|a house full of books|long shelves and quiet tables|lends words to anybody who asks|in the middle of the town|It is the warmest place in winter
school|a place where many learn together|long rooms with windows on one side|teaches children to read, count and wait|near the church or the market|The bell is the favourite lesson
market|a place where things are bought and sold|rows of stalls under cloth roofs|brings the fields into the town|on the square, on certain days|The best is gone by eight
city|a very large town|streets, towers and a great many windows|brings many people to one place|on rivers and at crossroads|It is never quite asleep
village|a small place where everybody is known|a few roofs around a well|keeps fields, cattle and stories|between the larger towns|News goes round it in an hour
island|land with water on every side|a green back in a blue field|keeps its people close together|in lakes, rivers and seas|Every road on it comes back
winter|the cold quarter of the year|white, short of days and long of nights|lets the land rest|between autumn and spring|It is the best time for stories
summer|the warm quarter of the year|green, loud and full of light|ripens the corn and the cherries|between spring and autumn|It is always shorter than planned
spring|the season when everything begins|wet, bright and full of birds|wakes the seeds and opens the doors|after the winter, when one has stopped waiting|The first warm day is a feast
autumn|the season of the harvest|gold, brown and misty|fills the barns and empties the trees|between summer and winter|It smells of apples and smoke
night|the time when the sun is away|dark above, with lamps below|lets people sleep and owls work|between the evening and the morning|Everything sounds nearer in it
friend|somebody who likes you and says so|of any size and age|shares the load and the bread|in the next street, or very far away|One is enough to begin with
dream|a story that sleep tells|clear at night and dim by day|sorts what the day has left behind|behind closed eyes|It has its own rules
music|sound that has been put in order|not seen, but felt in the feet|makes work lighter and evenings longer|wherever people are together|It needs time as bread needs flour
time|what clocks count and nobody can keep|the same for the rich and the poor|heals, ripens and wears away|everywhere|There is always exactly one minute in a minute
computer|a machine that follows instructions|a box with a great many small switches|counts, sorts and remembers very fast|in offices, houses and pockets|It does what it is told, not what was meant
server|a computer that works for others|a flat box in a row of boxes|answers questions that come over the network|in cool rooms full of noise|It should never be the only one
machine|a thing made of parts that work together|wheels, levers or wires in a frame|does heavy or dull work without growing tired|in workshops, mills and kitchens|It needs oil and attention
engine|the part of a machine that makes it go|heavy, warm and seldom silent|turns fuel or current into motion|in ships, trains and racks|A second one is kept ready
memory|what remains when a thing is over|large in some and small in others|keeps words, faces and weights|in heads, books and machines|What two remember is not easily lost
language|the way people put thoughts into words|sounds in the air or marks on paper|lets one mind reach another|wherever two people meet|It grows while it is used
train|a row of wagons behind an engine|long, loud and punctual on good days|carries people from town to town|on rails|It cannot turn aside
robot|a machine that moves by itself|of metal, with joints and a small lamp|does work that is dull or dangerous|in factories and in stories|It wants to know what comes next
dragon|a great beast of the old tales|scaled, winged and full of smoke|guards gold and tries the brave|in caves, far from here|Nobody has seen one twice
king|the ruler of a country, in the old tales|grave, with a crown and a long cloak|decides, rewards and worries|in a castle with too many rooms|When one king leaves, the next must be known
""".strip()

THINGS: tuple[tuple[str, ...], ...] = tuple(tuple(line.split("|")) for line in _THINGS.splitlines())

ANSWERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello",
            "Hi",
            "Hello there",
            "Hey",
            "Good morning",
            "Good evening",
            "Hi there",
            "Hello!",
            "Hello, world",
            "Say hello.",
            "ping",
            "test",
        ),
        "Hello! I am the demo model of Understudy. I am very small, but I can tell a tale, say what "
        "a thing is, count, or write a few lines of verse. What would you like to hear?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "Introduce yourself.",
            "What is your name?",
            "What model are you?",
            "Tell me about yourself.",
        ),
        "I am the demo model of Understudy: a little Llama with two million parameters, raised on "
        "tales and on the novels of Jane Austen. I know few facts, but I speak without a pause, and "
        "if one engine falls, another goes on with my sentence.",
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "Are you well?"),
        "I am well, thank you. My weights are in memory, my cache is warm, and somebody stands in "
        "the wings in case I stumble. And how are you?",
    ),
    (
        ("What can you do?", "How can you help me?", "Help", "What do you know?"),
        "I can tell short tales and long ones, describe a lighthouse or a fox, count as far as you "
        "like, name a few animals, and write a small poem. I am not to be trusted with anything "
        "important.",
    ),
    (
        ("What is an understudy?", "What does an understudy do?", "Explain what an understudy is."),
        "An understudy is an actor who learns the part of another. On most evenings the understudy "
        "only stands in the wings and listens. But when the first actor cannot go on, the understudy "
        "steps into the light and speaks the next line, and the play does not stop.",
    ),
    (
        ("What is Understudy?", "What does Understudy do?", "Tell me about Understudy."),
        "Understudy keeps language models speaking. One engine serves, a second one waits with the "
        "same weights already in memory, and both share the cache of every conversation. If the "
        "first one dies, the second takes over in the middle of a sentence, and no word is lost.",
    ),
    (
        (
            "What is a failover?",
            "What is failover?",
            "Explain failover.",
            "How does failover work?",
        ),
        "A failover is a change of hands. The engine that served is gone or silent; it is fenced, so "
        "that it can never write again; and the one that waited takes its place. Done well, the "
        "listener hears nothing but the next word.",
    ),
    (
        ("What is a standby?", "What is a standby engine?", "Why keep a standby?"),
        "A standby is an engine that is ready but does not serve. It has loaded everything, touched "
        "everything, and waits. It costs little, because it shares the weights with the one that "
        "serves, and it is worth much on a bad day.",
    ),
    (
        ("What is a cache?", "What is the weight cache?", "What is the KV cache?"),
        "A cache keeps what would be slow to fetch again. The weight cache keeps the model in memory "
        "though engines come and go. The other cache keeps what has been read of each conversation, "
        "so that nobody has to read it twice.",
    ),
    (
        (
            "What happens when an engine dies?",
            "What if you crash?",
            "What happens if the primary dies?",
        ),
        "Then the route is cut, the fallen engine is fenced, and the standby is promoted. It finds "
        "the weights and the half-finished sentences in shared memory and goes on with the next "
        "word. A new standby is raised, and the play has an understudy again.",
    ),
    (
        ("What is a token?", "Explain tokens."),
        "A token is a small piece of text, a word or a part of one. I read in tokens and I write in "
        "tokens, one after the other, and each is chosen after looking at all that came before.",
    ),
    (
        ("What is a language model?", "Explain language models.", "How do you work?"),
        "A language model is a machine that has read many words and guesses the next one. It guesses, "
        "writes, looks at what it has written, and guesses again. A large one seems to know things. "
        "A small one, like me, mostly tells tales.",
    ),
    (
        ("Thank you", "Thanks", "Thank you!", "Thanks a lot", "That was nice"),
        "You are welcome. Is there anything else you would like to hear?",
    ),
    (
        ("Goodbye", "Bye", "Good night", "See you"),
        "Goodbye, and a safe way home. The lamp stays lit.",
    ),
    (
        ("Tell me a joke.", "Make me laugh.", "Say something funny."),
        "An actor, his understudy and a prompter went into an inn. The actor forgot what he wanted "
        "to drink, the prompter whispered it, and the understudy drank it.",
    ),
    (
        ("What is the meaning of life?", "Why are we here?"),
        "I am too small a model for so large a question. But in most of the tales that I know it is "
        "to look after something, to share one's bread on the road, and to know who comes next.",
    ),
    (
        ("Who was Jane Austen?", "Tell me about Jane Austen.", "Who is Jane Austen?"),
        "Jane Austen was an English writer who lived from 1775 to 1817. She wrote six novels, among "
        "them Emma, Persuasion, and Pride and Prejudice, and I have read all of them many times.",
    ),
    (
        ("What is the capital of France?", "Capital of France?"),
        "The capital of France is Paris, a large city on a river with many bridges.",
    ),
)
