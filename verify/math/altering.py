"""Lists words beside a number that change, deny or weaken it, in many languages: they are never units.

"5 doubled", "7 negativ", "5 et demi", "3 douzaines", "5 с половиной" and "9 fewer" are not 5, 7, 5, 3, 5 and 9. Things
that are counted ("apples", "Äpfel") are an open class and cannot be listed; words that alter a number (fractions,
multiples, powers, signs, comparisons, denials, operations, numerals) are a closed one, and are listed here. Words are
compared without case and accents: whole, by their beginning where a language inflects, or by their ending. Nor does a
unit begin with a preposition: "5 zum Quadrat", "5 в квадрате".
"""

from __future__ import annotations

import re
import unicodedata

_WHOLE = """
and or not no isn is was are be never maybe perhaps wrong false incorrect except excluded excluding unless only
alternatively instead otherwise else at most least minimum maximum to through from in out into between beyond cubed
squared choose times plus minus over under divided added raised root radical point repeating recurring below above
less more fewer than constant half halves third thirds quarter quarters fourth fifth sixth seventh eighth ninth tenth
hundredth thousandth millionth billionth percent percentage permille score gross hundred hundreds thousand thousands
million millions billion billions trillion trillions lakh crore dozens tens ones one two three four five six seven
eight nine ten eleven twelve twenty fraction doubled doubling tripled tripling quadrupled quintupled duplicated twice
thrice power powers factor mod modulo ish inverted about around almost nearly roughly approximately approx circa
squaring cubing alpha beta gamma delta epsilon theta lambda mu nu xi rho sigma tau phi psi omega pi sqrt log ln exp
sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan und oder nicht kein keine mal durch weniger mehr als halb
halbe halber halbes halben anderthalb einhalb dreiviertel mindestens hochstens wenigstens etwa ungefahr rund fast
beinahe knapp zuviel zuwenig halfte wurzel geteilt abzug hundert millionen milliarden zwei drei vier funf sechs sieben
acht neun zehn et ou ni pas moins fois demi demie demis demies tiers quart quarts environ presque puissance racine
divise divisee triplee mille deux trois quatre cinq sept huit neuf dix y o menos mas veces medio media medios medias
tercio tercios cuarto cuartos quinto quintos sexto sextos septimo septimos octavo octavos noveno novenos decimo
decimos raiz cien ciento cientos mil casi millon millones dos tres cuatro cinco seis siete ocho nueve diez e non meno
piu volte mezzo mezza mezzi terzo terzi quarto quarti quinti sesto sesti settimo settimi ottavo ottavi nono noni
decimi radice potenza quasi almeno cento mila meta diviso divisa elevato elevata milione milioni due tre quattro
cinque sei sette otto nove dieci meio meia mais vezes cem terco tercos triplo milhao milhoes helft halve kwart derde
keer maal min minder meer ongeveer bijna wortel macht kwadraat miljoen и или не раз раза минус плюс больше меньше
более менее около почти примерно вдвое втрое вчетверо дважды трижды пополам треть трети третьих пятых шестых седьмых
восьмых девятых десятых сотых тысячных сто сот сотен сотни квадрате кубе корень корня кроме только свыше нет ни лишь
полтора полторы чем миллион миллиона миллионов миллиард миллиарда миллиардов два две три четыре пять шесть семь восемь
девять десять і й або мінус разів рази більше менше майже квадраті кубі півтора мільйон мільйони мільйонів lub razy
mniej wiecej pol prawie okolo poltora milion miliony milionow och eller ganger mer mindre halv halva kvart nastan
halften gange mere halvt miljon millioner ve veya kati yarim yarisi ceyrek eksi karesi fazla eksik yuzde carpi milyon
krat vice mene pul ctvrt sto es fel felet fele harmad negyed haromnegyed egesz nem vagy ezer millio szazalek puoli
puolta ja kertaa miinus tuhatta kymmenta prosenttia ruoi nua gap lan phan tram nghin trieu ty khong hoac am hon kem
pool poolteist korda pus un reiz puse ir pola puta po i eta erdi mig mitja mitjana vegades leith hanner halfur og
separuh ribu juta bucuk bin kalahati nusu na gjysme duono duonon si jumatate din fara ori pe половина полвина хагас
жарым жарты пола пута κι ημισυ kali setengah lebih kurang διπλασιο μισο μισα μειον συν φορες puolet kolmasosa
kolmasosaa viidesosaa kymmenesosaa tuhat sata sataa vahemman enemman szaz otod hatod nyolcad tized szazad ezred szor
szer minusz kevesebb tobb chuc ngan ti ta muoi tru khoang va yuz kat misli ucte ratus miliar lusin kodi puluh belas
perempat seperempat pertiga sepertiga kuadrat persen mie mii suta sute treime treimi zecime zecimi poltorej setka
setki setek trzecie trzecich czwarte czwartych piatych dziesiatych tucty stvrt hundra hundre hundrede honderd
anderhalve tusen tusind tolfte tjog snes eineinhalb zweieinhalb bilhao bilhoes milhar milhares veerand sada tuce
tolfta zece
"""
_BEGINNINGS = """
multipli increas decreas reduc subtract factorial dozen verdoppel verdrei verviel vervier verfunf drittel viertel
funftel sechstel siebtel achtel neuntel zehntel hundertstel tausendstel quadrier kubier vermindert vermehrt verringert
erhoht kehrwert gegenzahl fakultat dutzend tausend prozent promill milliarde decupl moitie factoriel augment diminu
redui ajout soustra douzain dizain vingtain centain millier pourcent doublee triplic cuadruplic quadruplic duplicad
mitad opuest docena decena centena millar aument disminu restad sumad dividid porcent elevad raddopp dozzin decin
centinai migliai fattorial ridott sommat sottratt percent metade duzi dezena fatorial somad subtra verdubb verdrievoud
dozijn duizend procent halveer удво утроен учетвер половин четверт степен дюжин десятк тысяч процент факториал увелич
уменьш сокращ прибав вычит вычт умнож деленн поделен кратн подво потроє збільш зменш тисяч відсот podwoj potroj polow
cwierc tuzin tysiac fordubbl dussin duzin puolik kolmann neljann viidenn kaksinkert kolminkert tuplat miljoon kymmen
ketszer haromszor tobbszor tizenketted tucat szazad ezred polov polovic hiljad tisuc desetin cetvrt trecin dvostruk
trostruk menyek ganda lipat gjysm dvojnasob trojnasob polovi tucet tisic jumat sfert patrat διπλ τριπλ puolt kymmenn
miljard milliard miliard milijon milijard miljon tusin prosentt millio szazal duplaj duzine dusin prosent halv
tredjedel fjardedel fjerdedel femtedel tiondel tiendedel millia milion tysiec stovk tretin ctvrtin stvrtin cetvrtin
cetrtin petin setin tisicin stotin tisoc tosin tukstan tukstos simt хиляд хиљад дузин десетин стотин милион милиард
полов трет мільярд сотн четвърт anderthalb sestin osmin
"""
_ALONE = """
quadrat kubik carre cube square cuadrado cubo quadrato quadrado kwadrat quadratisch квадрат куб kare kvadrat τετραγωνο
greater smaller larger higher lower lesser double triple quadruple quintuple kleiner grosser geringer doppelt mayor
menor mayores menores doble dobles maggiore minore doppio doppia doppi triplo tripla dobro dubbel dubbele dobbelt
"""
_ALONE_BEGINNINGS = """
negat opposit invers recipr conjug imagin maxim minim oppos superieur inferieur entgegengesetz отрица обратн
противополож двойно тройно від'ємн протилеж ujemn odwrotn zaporn αρνητ
"""
"""these alter a number only where nothing else stands beside it: "5 carré", but not "12 mètres carrés"; "7 negative",
but not "7 negative roots" """
_PREPOSITIONS = """
hoch zum zur vom von uber unter um ohne bis statt fur sur sous aux sauf sans que jusqu para entre sobre sin con hasta
senza fra tra oltre fino sem com ate zonder tot op keer tegen в на с от до к без за по из при над под між від без bez
nad pod przez bis
"""
_ENDING = re.compile(
    r"(?:fold|wise|iemes?|esim[oi]|eavos?|fach(?:e[nrs]?)?|iert|voudig|kertainen"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|hundred|thousand|illion)ths?)$"
)
_PARTICIPLE = re.compile(
    r"^[a-z]{2,}(?:ed|ly)$|^(?:ge|ver|zer)\w{3,}[td]$|(?:..(?:ado|ido|ato|ito|uto)|é|нн(?:ое|ый|ая))$"
)
"""alone beside a number ("5 inverted", "5 dimezzato") it says what was done to it; behind a thing, what it is like"""
_COUNTED = "bed seed weed breed reed shed sled red speed daily weekly monthly yearly hourly nightly"
_HAN = re.compile(
    "[的到减加乘除以半成折不非错或和与至约多余几倍分之千百十亿万负正翻]|平方$|立方$|次方|方根|根号|阶乘|打$|左右|上下|相反|倒数"
    "|绝对|大于|小于|超过|未满|[少增扩缩较]|二乗|三乗|乗$|未満"
)
_OTHER_SCRIPTS = re.compile(
    "の|マイナス|プラス|ダース|パーセント|より|의|배$|제곱|절반|반$|음수|이상|이하|초과|미만|다스|퍼센트|보다"
    "|ครึ่ง|نیم|برابر|আধা|সাড়ে|অর্ধ|साढ़|அரை|ნახევ|կես|พัน|ร้อย|ล้าน|โหล|ألف|آلاف|مليون|مليار|مئة|مائة|دزين"
    "|^[십백천만억]+|אלף|אלפ|מיליון|מיליארד|חצי|חצא|רבע|שליש|תריסר|מאה|מאות|אחוז|כפול"
    "|हज़ार|हजार|लाख|करोड़|सौ|दर्जन|डेढ़|ढाई|चौथाई|तिहाई"
    "|ضعف|نصف|مربع|سالب|ناقص|زائد|ربع|ثلث|أقل|أكثر|दोगुन|तिगुन|आध|वर्ग|ऋण|प्रतिशत|गुन"
)


_PLAIN_LETTERS = str.maketrans("ıłđø", "ildo")


def _folded(word: str) -> str:
    """Return a word without case and accents."""
    parts = unicodedata.normalize("NFKD", word.casefold().translate(_PLAIN_LETTERS))
    return unicodedata.normalize("NFC", "".join(sign for sign in parts if not "\u0300" <= sign <= "\u036f"))


def _words(text: str) -> frozenset[str]:
    return frozenset(map(_folded, text.split()))


_WHOLE_WORDS, _ALONE_WORDS, _FIRST_WORDS = _words(_WHOLE), _words(_ALONE), _words(_PREPOSITIONS)
_COUNTED_WORDS = _words(_COUNTED)
_STEMS, _ALONE_STEMS = tuple(sorted(_words(_BEGINNINGS))), tuple(sorted(_words(_ALONE_BEGINNINGS)))


def alters(words: list[str]) -> bool:
    """Return whether the words beside a number make another number of it, or none."""
    folded = [_folded(word) for word in words]
    if folded[0] in _FIRST_WORDS:
        return True
    alone = folded[0] in _ALONE_WORDS or folded[0].startswith(_ALONE_STEMS) or _is_participle(words[0])
    if alone and len(words) == 1:
        return True
    return any(
        word in _WHOLE_WORDS or word.startswith(_STEMS) or _ENDING.search(word) or _HAN.search(word)
        or _OTHER_SCRIPTS.search(word)
        for word in folded
    )  # fmt: skip


def _is_participle(word: str) -> bool:
    """Return whether a word ends as a past participle or adverb; no plural does, and German nouns are capitalised."""
    return word not in _COUNTED_WORDS and _PARTICIPLE.search(word) is not None
