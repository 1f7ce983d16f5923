"""The words of the demo model's training dialogues, and random values for every kind of argument."""

import functools
import random
import re
import string
import zlib
from pathlib import Path
from typing import NamedTuple

NOUNS = """account album alarm animal answer apple archive article artist asset audit author backup badge bank
banner barrel basket battery beach bicycle bill bird board boat book bottle box branch bread bridge brush bucket budget
building bus button cabin cable cake calendar camera campaign candle canvas captain car card cargo carpet castle cat
chair channel chapter chart chess chicken child church circle client clock cloud club coach coast code coffee coin
college color comment company contract cookie copy corner cotton country course cover cow craft crown culture cup
customer dance deal desert design desk device dinner diploma doctor document dog door dragon drawer dream dress drink
driver duck eagle ear earth edge egg elephant employee energy engine episode error essay event exam expense experiment
eye fabric factory family farm feather feature fence festival field file film finger fire fish flag flight floor flower
folder food forest fork form fox frame friend fruit furniture galaxy game garden gate gift glass glove goal gold grant
grape grass guest guide guitar hammer harbor hat health heart helmet hero hill history holiday home honey horse hospital
hotel house idea image incident insect invoice island issue item jacket jewel job journal journey juice jungle key
kitchen kite knife label ladder lake lamp language laptop law leaf lease lecture lemon lesson letter level library
license light lion list loan lock log machine magazine manual map market mask meal meeting member memory menu message
metal meter milk mirror mission model money monkey month moon morning mountain mouse movie museum music nation needle
nest network night note novel number ocean office onion order orange oven owl package page paint palace panel paper park
parrot part party password patch path patient payment pen pencil people permit phone photo piano picture pilot pipe
planet plant plate player pocket poem policy pool post potato price printer prize profile project proposal question
queue rabbit race radio rain receipt recipe record refund region rent report request reservation result review ring
river road robot rocket role roof room rope rose rule salad sale salt sample school science screen script sea season
secret seed sensor server session shadow sheep shelf ship shirt shoe shop signal silver sister skill sky snake snow soap
song soup space spider spoon sport spring stage star station statue stone store storm story street student subscription
sugar suit summer sun survey table task tax teacher team temple tent theater ticket tiger tomato tool topic tower town
toy train transaction tree trip truck tunnel turtle umbrella uncle union user vacation valley vehicle vendor version
video village violin voice volcano voucher wallet warehouse watch water wave weather website wheel whale wind window
winter wolf wood word worker workspace year zebra zoo""".split()
ADJECTIVES = """active amazing ancient angry big bitter black blue bold brave bright broken brown busy calm cheap clean
clever cold cool curious dark deep dry early easy empty fancy fast final fresh friendly full funny gentle golden good
great green happy hard heavy hidden high hot huge hungry kind large late lazy little local long loud lucky modern narrow
new nice noisy old open orange perfect pink plain polite poor proud public purple quick quiet rare red rich rough round
sad safe secret sharp short shy silent simple slow small smart soft special strange strong sweet tall tiny tired urgent
warm weak weekly white wide wild wise wonderful yellow young""".split()
VERBS = """approve archive assign cancel check clone close compare convert copy count create delete deploy download
export fetch find flag forward generate import inspect install invite list lock merge move open pause print publish
rename renew reopen reserve reset restart restore resume review schedule scan share ship start stop submit suspend sync
tag test translate unlock update upload validate verify""".split()
CITIES = """Paris|London|Berlin|Tokyo|Madrid|Rome|Vienna|Oslo|Lisbon|Dublin|Prague|Warsaw|Athens|Cairo|Lagos|Nairobi|
Mumbai|Delhi|Beijing|Shanghai|Seoul|Sydney|Melbourne|Toronto|Montreal|Chicago|Boston|Seattle|Denver|Miami|Austin|Dallas|
New York|San Francisco|Los Angeles|Mexico City|Buenos Aires|Rio de Janeiro|Santiago|Lima|Bogota|Havana|Hong Kong|Bangkok|
Singapore|Jakarta|Manila|Hanoi|Istanbul|Dubai|Moscow|Helsinki|Stockholm|Copenhagen|Amsterdam|Brussels|Geneva|Zurich|
Milan|Naples|Venice|Barcelona|Porto|Munich|Hamburg|Cologne|Budapest|Bucharest|Sofia|Belgrade|Zagreb|Reykjavik|Edinburgh|
Glasgow|Manchester|Liverpool|Cape Town|Casablanca|Tunis|Accra|Kyoto|Osaka|Taipei|Auckland|Wellington|Vancouver|Ottawa|
Phoenix|Houston|Atlanta|Portland|San Diego|Las Vegas|Orlando|Nashville|Detroit|Springfield|Salt Lake City""".replace("\n", "").split("|")
NAMES = """Alice|Bob|Carol|David|Emma|Frank|Grace|Henry|Irene|Jack|Karen|Liam|Maria|Nina|Oscar|Paul|Quinn|Rosa|Sam|Tina|
Victor|Wendy|Xavier|Yara|Zoe|Anna|Ben|Clara|Daniel|Elena|Felix|Hannah|Ivan|Julia|Kevin|Laura|Marco|Noah|Olivia|Peter|
Rachel|Simon|Tom|Ursula|Vera|Walter|Priya|Chen|Yuki|Omar|Fatima|Ahmed|Ingrid|Lars|Sofia|Mateo|Lucia|Pierre""".replace("\n", "").split("|")
COUNTRIES = """France|Germany|Spain|Italy|Japan|China|India|Brazil|Canada|Mexico|Egypt|Kenya|Norway|Sweden|Finland|Poland|
Greece|Turkey|Peru|Chile|Cuba|Ireland|Portugal|Austria|Hungary|Denmark|Iceland|Thailand|Vietnam|Australia""".replace("\n", "").split("|")
LANGUAGES = "English French German Spanish Italian Japanese Chinese Korean Arabic Hindi Dutch Polish Turkish Greek".split()
CURRENCIES = "USD EUR GBP JPY CHF CAD AUD CNY INR SEK NOK BRL MXN KRW".split()
ZONES = """Europe/Paris|Europe/London|Europe/Berlin|Asia/Tokyo|Asia/Seoul|Asia/Kolkata|America/New_York|America/Chicago|
America/Denver|America/Los_Angeles|Australia/Sydney|Africa/Cairo|UTC|Pacific/Auckland|GMT|CET""".replace("\n", "").split("|")
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "today|tomorrow|Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday|next week|tonight".split("|")
DOMAINS = ["example.com", "mail.com", "acme.org", "company.io", "test.net", "corp.dev"]
CAPITALS = dict(zip(COUNTRIES, """Paris|Berlin|Madrid|Rome|Tokyo|Beijing|New Delhi|Brasilia|Ottawa|Mexico City|Cairo|Nairobi|Oslo|
Stockholm|Helsinki|Warsaw|Athens|Ankara|Lima|Santiago|Havana|Dublin|Lisbon|Vienna|Budapest|Copenhagen|Reykjavik|Bangkok|Hanoi|
Canberra""".replace("\n", "").split("|"), strict=True))
_ONSETS = "b bl br c ch cl d dr f fl fr g gl gr h j k kr l m n p pl pr qu r s sh sk sl st t th tr v w x y z".split() + [""]
_VOWELS = "a e i o u ai ea ee io oo ou".split()
_CODAS = ["", "", "", "n", "r", "s", "l", "t", "m", "nd", "rk", "x", "ck", "sh", "p", "g"]


class Value(NamedTuple):
    """An argument: as the user says it, and as it stands in the call's JSON."""

    spoken: str
    json: object


@functools.cache
def general_words() -> list[str]:
    """Every word of the word lists and of the YAML files beside this one."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("demo_*.yaml"))]
    lists = [*NOUNS, *ADJECTIVES, *VERBS, *CITIES, *NAMES, *COUNTRIES, *CAPITALS.values(), *LANGUAGES]
    return sorted({word for text in (*texts, " ".join(lists)) for word in re.findall(r"[A-Za-z]+", text)})


def pseudo_word(rng: random.Random) -> str:
    """A word that nobody has seen, or one out of place: it can only be copied."""
    style = rng.random()
    if style < 0.35:
        return rng.choice(general_words()).lower() + rng.choice(["", "", "s", "s", "ing", "ed", "er", "est", "ly", "ic", "ia"])
    if style < 0.45:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8)))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 3)))
    )


def is_held_back(word: str) -> bool:
    """A tenth of all words is never seen in training, only in scoring."""
    return zlib.crc32(word.encode()) % 10 == 0


class Words:
    """Random words and values, from the training words or from the held-back ones."""

    def __init__(self, rng: random.Random, *, held_back: bool = False) -> None:
        self.rng = rng
        self.held_back = held_back

    def pick(self, words: list[str], pseudo: float = 0.25) -> str:
        """One of `words`; with the given probability a pseudo-word in the same case."""
        if self.rng.random() < pseudo:
            word = pseudo_word(self.rng)
            return word.capitalize() if words[0][0].isupper() else word
        return self.rng.choice([word for word in words if is_held_back(word) == self.held_back] or words)

    def phrase(self) -> str:
        """Two to five words, as somebody would type them into a search box."""
        rng = self.rng
        parts = [self.pick(NOUNS)] if rng.random() < 0.5 else [self.pick(ADJECTIVES), self.pick(NOUNS)]
        if rng.random() < 0.4:
            parts += [rng.choice(["in", "for", "of", "with", "from", "near", "and", "on"]), self.pick(NOUNS + NAMES)]
        if rng.random() < 0.25:
            parts.insert(0, rng.choice(["best", "history of", "how to make", "cheap", "latest", "what is"]))
        if rng.random() < 0.15:
            parts = [pseudo_word(rng) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.15:
            parts.insert(0, rng.choice(["the", "a", "my", "all", "our", "every"]))
        if rng.random() < 0.2:
            parts.append(rng.choice([*CITIES, *COUNTRIES, "2018", "2025", "2026", "news", "tutorial", "price"]))
        return " ".join(parts)

    def sentence(self) -> str:
        """A short text of one or two plain sentences, or of words in no language."""
        rng, style = self.rng, self.rng.random()
        if style < 0.15:
            return f"{self._plain_sentence()}{rng.choice(['. ', ', ', ' and ', '? ', '! '])}{self._plain_sentence()}"
        if style < 0.4:
            words = [pseudo_word(rng) + rng.choice(["", "", "", "", ","]) for _ in range(rng.randint(1, 7))]
            return " ".join([words[0].capitalize(), *words[1:]]).strip(",") + rng.choice(["", "", ".", "!", "?"])
        return self._plain_sentence()

    def _plain_sentence(self) -> str:
        rng = self.rng
        noun, other, adjective = self.pick(NOUNS), self.pick(NOUNS), self.pick(ADJECTIVES)
        name = self.pick(NAMES)
        return rng.choice([
            f"The {noun} is {adjective}", f"{name} will bring the {noun}", f"I like the {adjective} {noun}",
            f"Please send the {noun} to {name}", f"The {noun} and the {other} are {adjective}",
            f"We need a {adjective} {noun} for the {other}", f"{name} says hello", f"Where is the {adjective} {noun}",
            f"The {noun} starts at {rng.randint(1, 12)}", f"My {noun} has {rng.randint(2, 90)} {other}s",
        ])  # fmt: skip

    def value(self, kind: str) -> Value:
        """A random value of a kind: one of the names below, `int:low:high`, or `enum:a|b|c`."""
        name, _, rest = kind.partition(":")
        if name == "enum":
            text = self.rng.choice(rest.split("|"))
            return Value(text, text)
        if name == "int":
            low, high = map(int, rest.split(":"))
            number = self.rng.randint(low, high) if self.rng.random() < 0.5 else self.rng.randint(low, min(high, low + 99))
            return Value(str(number), number)
        if name == "num":
            return self._number()
        if name == "bool":
            on = self.rng.random() < 0.5
            return Value("on" if on else "off", on)
        if name in ("numbers", "people"):
            return self._list(name)
        text = self._text(name)
        return Value(text, text)

    def _list(self, kind: str) -> Value:
        size = self.rng.randint(1, 4)
        if kind == "people":
            names = [self.pick(NAMES) for _ in range(size)]
            return Value(" and ".join(filter(None, [", ".join(names[:-1]), names[-1]])), names)
        numbers = [self.rng.randint(0, 10 ** self.rng.randint(1, 3)) for _ in range(size + 1)]
        return Value(self.rng.choice([", ", ",", " "]).join(map(str, numbers)), numbers)

    def _number(self) -> Value:
        rng = self.rng
        if rng.random() < 0.35:
            number = round(rng.uniform(0, 10 ** rng.randint(1, 3)), rng.choice((1, 2)))
            return Value(str(number), number)
        whole = rng.randint(0, 10 ** rng.randint(1, 5))
        return Value(str(whole), whole)

    def _text(self, kind: str) -> str:  # noqa: PLR0911, C901, PLR0912 a table of kinds
        rng = self.rng
        match kind:
            case "city":
                return self.pick(CITIES, 0.3)
            case "place":
                city = self.pick(CITIES, 0.3)
                return f"{city}, {rng.choice(['CA', 'NY', 'TX', *COUNTRIES])}" if rng.random() < 0.3 else city
            case "country":
                return self.pick(COUNTRIES)
            case "person":
                return self.pick(NAMES)
            case "fullname":
                return f"{self.pick(NAMES)} {pseudo_word(rng).capitalize()}"
            case "email":
                return f"{self.pick(NAMES).lower()}{rng.choice(['', '.' + pseudo_word(rng), str(rng.randint(1, 99))])}@{rng.choice(DOMAINS)}"
            case "noun":
                return self.pick(NOUNS, 0.4)
            case "title":
                return f"{self.pick(ADJECTIVES).capitalize()} {self.pick(NOUNS).capitalize()}"
            case "phrase":
                return self.phrase()
            case "sentence":
                return self.sentence()
            case "date":
                return f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}" if rng.random() < 0.5 else rng.choice(DAYS[:9])
            case "isodate":
                return f"202{rng.randint(4, 7)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
            case "time":
                return f"{rng.randint(0, 23):02}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02}"
            case "zone":
                return rng.choice(ZONES)
            case "zone_or_city":
                return rng.choice(ZONES) if rng.random() < 0.4 else self.pick(CITIES, 0.3)
            case "sql":
                return self._sql()
            case "html":
                return f"<{(tag := rng.choice(['p', 'h1', 'b', 'em', 'li', 'h2']))}>{self.phrase()}</{tag}>"
            case "pseudos":
                return " ".join(pseudo_word(rng) for _ in range(rng.randint(1, 4)))
            case "language":
                return rng.choice(LANGUAGES)
            case "currency":
                return rng.choice(CURRENCIES)
            case "symbol":
                return "".join(rng.choices(string.ascii_uppercase, k=rng.randint(3, 5)))
            case "id":
                style = rng.randrange(4)
                digits = str(rng.randint(100, 999999))
                letters = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(1, 3)))
                return (digits, f"{letters}-{digits}", f"{letters}{digits}", f"{pseudo_word(rng)}_{digits[:3]}")[style]
            case "path":
                parts = [self.pick(NOUNS) for _ in range(rng.randint(1, 3))]
                return f"{rng.choice(['/', '', './', '~/'])}{'/'.join(parts)}.{rng.choice(['txt', 'py', 'md', 'json', 'csv', 'log'])}"
            case "folder":
                return "/" + "/".join(self.pick(NOUNS) for _ in range(rng.randint(1, 3)))
            case "expression":
                return self._expression()
            case "markdown":
                return self._markdown()
        raise ValueError(f"unknown kind of value: {kind!r}")

    def _markdown(self) -> str:
        rng, text, noun = self.rng, self.phrase(), self.pick(NOUNS, 0.4)
        piece = rng.choice([f"# {text.title()}", f"**{text}**", f"- {noun}", f"*{noun}* and **{text}**", f"## {text}", f"_{text}_",
                            f"**{noun}** and _{text}_", f"[{text}](https://{noun}.com)", f"`{noun}`", f"1. {text}"])  # fmt: skip
        return f"{piece} {text}" if rng.random() < 0.1 else piece

    def _sql(self) -> str:
        rng = self.rng
        columns = rng.choice(["*", "COUNT(*)", self.pick(NOUNS), f"{self.pick(NOUNS)}, {self.pick(NOUNS)}"])
        text = f"SELECT {columns} FROM {self.pick(NOUNS)}s"
        if rng.random() < 0.5:
            text += f" WHERE {self.pick(NOUNS)} {rng.choice(['=', '>', '<'])} {rng.randint(0, 999)}"
        if rng.random() < 0.3:
            text += f" LIMIT {rng.randint(1, 100)}"
        return text

    def _expression(self) -> str:
        rng = self.rng
        left, middle, right = (str(rng.randint(1, 10 ** rng.randint(1, 4))) for _ in range(3))
        first, second = rng.choices(["+", "-", "*", "/"], k=2)
        gap = rng.choice(["", " ", " "])
        text = f"{left}{gap}{first}{gap}{middle}"
        if rng.random() < 0.3:
            text = f"({text}){gap}{second}{gap}{right}"
        return text
