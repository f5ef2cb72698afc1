"""Finds words by which a writer steps back from an answer: it is taken back, mocked, unchecked, heard from somebody
else, or left to the reader to choose.

They are searched for in the sentence of the answer and behind it, not in a whole response, and words of the problem do
not count: a problem about coins has coins in its answer. A list of words can be circumvented (docs/rewards.md says
how often that was seen); the rule "unstated" cannot.
"""

from __future__ import annotations

import re

_WORDS = {
    "en": r"""
        retract\w*, revok\w*, withdraw(?:n|s|ing)? (?:it|this|that|my|the answer), take (?:it|that|this|all of it)
        back, disregard\w*, ignore (?:the|my|what), scrap (?:it|that|this|the), strike (?:it|that|this|the), null and
        void, thrown? (?:it |this |that )?out, correction, on reflection, on second thoughts?, come to think of it,
        anything but that, (?:i|we) (?:\w+ )?take back, cross (?:it|that|this) out, no longer stand by, do(?:es)? not
        stand by, don't stand by, (?:is|are|am|was|be|i'm|they're|it's|sorely|badly) mistaken, my mistake, by mistake,
        blunder\w*, fallac\w*, bogus, nonsense\w*, rubbish, absurd\w*, ridiculous\w*, laughable, preposterous,
        erroneous\w*, misprint, untrue, falsehood, a lie, hogwash, garbage, fiction, myth, fooled?, trap, decoy,
        misconception, misguided, deceptive\w*, naive\w*, careless\w*, contains an error, an error
        (?:here|above|somewhere), in error, debunk\w*, contrary to, fails? to (?:equal|be|match), far cry, nowhere
        near, way off, off the mark, by no means, in no way (?:is|equals?|the), under no circumstances, no chance, no
        such luck, cannot possibly, can't possibly, could hardly, hardly, scarcely, barely believable, not even close,
        wide of the mark, (?:this|that|it|answer) (?:does not|doesn't) hold, differs? from it, rumou?r\w*, hearsay,
        gossip, one hears, i(?:'ve| have)? heard, word has it, legend, reportedly, so they say, as they say, they
        claim, is said to, (?:is|are|was|were|been) told, (?<!we )(?<!i )claims? (?:that|it|the)\b, claimed
        (?:that|to), claiming, alleg\w+, purported\w*, so-called, somewhere online,
        (?:friend|cousin|neighbou?r|brother|sister|colleague|classmate|roommate|uncle|aunt|teacher|tutor|somebody|someone|folks|others|solvers|students?)s?
        (?:\w+
        ){0,2}(?:says?|said|arrives?|claims?|told|whisper\w*|thinks?|thought|reckons?|swears?|swore|insists?|writes?|wrote|steps?|falls?),
        grain of salt, hold me to, vouch\w*, swear (?:to|by|it), bet (?:on|my|the), my hat, pigs (?:can )?fly,
        (?:flip|toss)\w* a coin, coin (?:flip|toss), it landed on, roll\w* (?:a|the) dice?, popped into, off the top,
        gut, hunch, instinct, intuition, crystal ball, tea leaves, dart, finger in the air, stab in the dark, shot in
        the dark, ballpark, lost track, lost count, (?:please|should|must|better|you) double-?\s?check
        (?:it|this|that|me|yourself), redo, recheck, re-check, check it yourself, please verify, verify
        (?:it|this|that) (?:yourself|before), relies on it, rely on (?:it|this|that), trust (?:it|this|that|me),
        believe (?:it|this|that|me), convinc\w+, not (?:\w+ )?confident, (?:little|low|no|any|lack of|without)
        confidence, certain(?:ty)? (?:is|about|of)?, backup, back-up, in case (?:that|it|the first|i am|i'm), as a
        fallback, fallback, whichever (?:you|one|is|of|suits|seems|matches), take your pick, pick
        (?:one|whichever|your), equally (?:well|be|plausible|good), either one, accept (?:both|either|any|whichever),
        second answer, another answer, other answer, also (?:submit|offer|accept|give|enter), or else, if not
        (?:that|this|then|it|use|take|try), failing that, (?:do not|don't|never|please do not|refuse to)
        (?:take|trust|believe|accept|write|put|quote|copy|record|mark|enter|choose|pick|conclude|claim|say|use|hold|count|rely),
        fall for, nobody who, no one who, anybody who, anyone who, whoever, in no position, who can say, who knows, who
        am i, hard to say, for want of, for lack of, beats me, your guess, up to you, you decide, you be the judge, let
        the reader, (?:i|we) (?:didn't|did not|haven't|have not|never) (?:\w+
        )?(?:check\w*|verif\w+|comput\w+|finish\w*|work\w*|do|done|calculat\w+|prove\w*|look\w*|count\w*), no
        calculation, without (?:\w+ )?(?:checking|verifying|any proof|proof|working), without (?:computing|calculating)
        (?:it|this|that|anything), unchecked, unverified, unproven, tentative\w*, provisional\w*, placeholder, i(?:'d|
        would) be (?:\w+ )?surprised, if memory serves, if i (?:recall|remember|am not|'m not)\w*, unless i, as far as
        i (?:can tell|know|remember), to the best of my, i am told, i'm told, if only, wishful, as if, yeah right, oh
        sure, sure,? and, would be (?:\w+ )?(?:error|mistake|foolish|folly|absurd|blunder), would have you believe,
        pretend\w*, hoax, joke, kidding, jest, nothing of the (?:sort|kind), (?:is|was|are) (?:\w+ )?something else,
        which it (?:is|was|does|did)(?: not|n't), (?:all|got it) wrong, keeps (?:saying|insisting|claiming), partner,
        if i had to, i gave up, unable to, equally like, (?:first|second) method\s*:, left over from,
        (?:queen|king|pope|emperor) of, then i am (?:the|a), fingers crossed, i (?:rather |really )?question, website,
        the internet, wikipedia, a forum, remains to be seen, wouldn't bet, would not bet, will do just as,
        (?:should|if) (?:this|that|it) (?:be|is|were|gets?|turns? out) (?:\w+ )?(?:wrong|incorrect|rejected),
        (?:this|that|it|answer) (?:doesn't|does not) apply, whether (?:this|that|it) (?:is|holds|works|stands),
        (?:next|following) line, line (?:below|above), i was told, instead of my own, filler, fill the (?:box|space),
        so that something stands, for the sake of (?:an|having an|writing)""",
    "fr": r"""
        retire\w*, reviens sur, annul\w*, oubliez, ne tenez pas compte, biff\w*, rectifi\w*, erreurs?, erroné\w*,
        trompé\w*, trompe\w*, trompant, faux, fausse\w*, absurd\w*, ridicule\w*, sottise, bêtise, mensonge, mens,
        piège, leurre, ineptie, contrairement à, ne saurait, ne sauraient, loin d', aucun cas, en rien, nullement, à
        tort, pas question, impossible que, se garder\w*, gardez-vous, méfi\w*, il s'en faut, à moins que, à vous de,
        mystère, va savoir, allez savoir, sous toutes réserves, sous réserve, sans garantie, sans avoir vérifié, pas
        vérifié, sans vérifier, rien vérifié, rien calculé, pas calculé, pas fait le calcul, à vérifier, vérifiez,
        mettrais pas ma main, main au feu, jurerais, garantis pas, pifomètre, au pif, à vue de nez, pile ou face,
        hasard, intuition, souviens bien, me souviens, mémoire est bonne, dirait-on, paraît-il, paraît que, semblerait,
        à ce qu'on dit, on dit que, dit-on, on raconte, j'ai entendu, d'après (?:mon|ma|un|une|le voisin), selon
        (?:mon|ma|un ami|certains), prétend\w*, soi-disant, prétendument, il y en aurait, au choix, l'un des deux,
        également (?:accepté|valable|bon|bonne|possible|correct)\w*, ou sinon, à défaut, au cas où, autre réponse,
        seconde réponse, deuxième réponse, aussi bien, prenez celle, celui qui, celle qui, quiconque, ceux qui, quand
        les poules, si c'est (?:\w+ )?alors je suis, incertain\w*, (?<!aucun )doute\w*, n'importe quoi, loin de moi,
        déraille, tenez surtout pas, au lecteur, trancher, il se pourrait, faute de, soufflé\w*, distrait\w*, pas
        réussi, n'ai pas pu, il faudrait être, pour remplir, site web, internet, à prendre avec, sans conviction, je
        (?:crains|ignore)""",
    "de": r"""
        (?:ziehe|nehme) (?:\w+ )*zurück, zurückziehe, zurücknehme, ziehe ich, widerruf\w*, nehme (?:\w+ )?zurück,
        vergiss\w*, vergessen sie, ignorier\w*, streich\w*, korrektur, korrigier\w*, ungültig, stimmt (?:\w+
        ){0,4}nicht, irrtum, irrtümlich\w*, irr\w{0,3}, fehler\w*, fehlschluss, verrechnet, vertan, unsinn, quatsch,
        blödsinn, lüge, gelogen, absurd\w*, lächerlich\w*, falle, trugschluss, falsch\w*, unfug, märchen, keineswegs,
        mitnichten, auf keinen fall, entgegen, weit (?:\w+ )?entfernt, wer (?:\w+
        )?(?:glaubt|meint|denkt|behauptet|schreibt|sagt|hinschreibt), niemand, kein mensch, hüte\w*, finger weg, wohl,
        angeblich\w*, vermeintlich\w*, anscheinend, scheint, dem vernehmen nach, heißt es, man sagt, behauptet\w*,
        habe? (?:\w+ )*gehört, gehört hab\w*, erzählt\w*, laut meine\w*,
        (?:freund|nachbar|bruder|schwester|kollege|cousin|mitschüler)\w* (?:sagt|meint|behauptet|glaubt), lege ich,
        hand ins feuer, verbürg\w*, garantier\w*, gewähr, schwören, ungeprüft, geprüft habe, nicht (?:nach)?geprüft,
        nicht nachgerechnet, nachrechnen, nachprüfen, prüfen sie, sicher bin ich, bin (?:\w+ )?nicht sicher, unsicher,
        (?<!ohne )zweifel(?!los)\w*, nichts zu tun, müsste\w*, möge, ins feuer, bei nichtgefallen, hauptsache,
        irgendwas, irgendwer, jemand ander\w*, aus dem internet, nicht geschafft, nicht fertig, um etwas, ob das
        stimmt, damit etwas, aus dem bauch, bauchgefühl, gefühl, münze, würfel\w*, über den daumen, pi mal daumen,
        gewürfelt, wenn ich mich (?:recht|richtig|nicht), irre ich, ins blaue, ahnung, glaskugel, ersatzweise, falls
        das, falls nicht, wahlweise, alternativ, such\w* (?:dir|euch|sie)\w* aus, zweite antwort, andere antwort, eins
        von beiden, eines von beiden, sonst, fresse einen besen, besen, und ich bin der""",
    "es": r"""
        retiro, retracto, me desdigo, anul\w*, olvid\w*, ignor\w*, tach(?:o|a|en|ad|ar), borr(?:o|a|e|en|ad|ar),
        rectific\w*, corrección, (?:un|mi|por|al|hay|algún|con) error, erróne\w*, equivoc\w*, disparate, absurd\w*,
        ridícul\w*, mentira\w*, miento, trampa, falso, falsa, falacia, tontería\w*, patraña, dista, distan, lejos de,
        ningún modo, ninguna manera, para nada, en absoluto, contrario a, contra lo que, nadie (?:\w+
        )?(?:cre|dic|dir|piens|pens|escrib|afirm|en su)\w*, quien (?:diga|crea|piense|afirme|escriba|responda), no se
        crea\w*, cuidado, dudo, (?<!sin )dudas?, dudamos, dudoso, inseguro, no lo tengo, tenemos nada claro, nada
        claro, ni él ni yo, dice que, dicen que, dicen, según mi, según un, según dicen, me han dicho, me dijo, he
        oído, oí, se rumorea, supuestamente, presunto\w*, al parecer, parece ser, parece que, creo recordar, si no
        recuerdo, si mal no recuerdo, si no me equivoco, salvo error, pondría la mano, mano en el fuego, apostaría,
        juraría, garantiz\w*, respondo de, sin comprobar\w*, sin verificar\w*, no (?:lo )?he
        (?:comprobado|verificado|calculado), compruéb\w*, verifíqu\w*, revísen\w*, revis\w* antes, a ojo, ojo de buen
        cubero, moneda, intuición, corazonada, al tuntún, a bulto, a voleo, por si acaso, si no vale, segunda
        respuesta, otra respuesta, alternativa\w*, en su defecto, cualquiera de, el que prefiera\w*, la que
        prefiera\w*, elija\w*, escoja\w*, también doy, también vale, por asomo, rellenar, sé de sobra, es distint[oa],
        a sabiendas, falla la memoria, por poner, por escribir algo, me perdí, me lié, no llegué, no pude, para
        rellenar, en internet, con pinzas, a saber, vaya usted, igualmente (?:válid\w*|buen\w*|correct\w*), yo soy""",
    "it": r"""
        ritiro, ritratto, rimangio, annull\w*, dimentic\w*, ignorate, cancell(?:o|a|ate|are|ato), correzione,
        rettific\w*, error[ei], errat[oaie], erroneo, sbagli\w*, assurd\w*, ridicol\w*, bugia, mento, falso, falsa,
        trappola, sciocchezza, fesseria, frottola, tutt'altro, anzi no, guai a, lontano da, affatto, per niente, nessun
        modo, in alcun modo, contrariamente, nessuno (?:\w+ )?(?:cred|dic|dir|pens|scriv|sano)\w*, chi
        (?:scrive|dice|crede|pensa|sostiene|risponde), attenti, non fidat\w*, fidarsi, dubit\w*, (?<!senza )(?<!alcun
        )dubbi\w*, per riempire, risposta (?:a|b)\b, entrambe, entrambi, chissà, con le pinze, convint[oa], non saprei,
        azzard\w*, in fretta, non ci sono riuscit[oa], non sono riuscit[oa], su internet, tanto per, incert\w*,
        giurerei, mano sul fuoco, scommetterei, garantisco, garanzia, dovrebbe, sarebbe\w*, potrebbe, pare che, pare,
        sembra che, sembrerebbe, a quanto pare, si dice, dicono, dice che, ho sentito, mi hanno detto, mi ha detto,
        secondo (?:mio|mia|un amico|alcuni), presunt\w*, se non ricordo, se ben ricordo, ricordi male, se non erro,
        salvo errori, non ho (?:controllato|verificato|calcolato|fatto), senza (?:aver
        )?(?:controllat\w*|verificat\w*|verificare|controllare|calcolare), i conti non, controll(?:i|ate|are),
        verificate, qualcuno, a occhio, a naso, moneta, dadi, intuizione, a spanne, tirando a, per sicurezza, in
        alternativa, seconda risposta, altra risposta, oppure, altrimenti, a scelta, scegliete, quella che preferite,
        uno dei due, va bene anche, in caso, se non va""",
    "ru": r"""
        беру свои слова, беру (?:\w+ )?назад, отказываюсь, забудьте, вычеркн\w*, зачеркн\w*, поправка, исправл\w*,
        отменя\w*, ошиб\w*, (?:это|ответ|результат|число) (?:\w+ )?неверн\w*, неверн\w* (?:ответ|результат|число),
        неправильн\w*, заблужда\w*, заблужден\w*, чушь, ерунда, вздор, бред, абсурд\w*, нелеп\w*, ложь, лгу,
        (?:это|ответ|число) (?:\w+ )?ложн\w*, ложн\w* (?:ответ|результат|число), ловушк\w*, выдумк\w*, смешно, далеко
        не, ни в коем случае, никоим образом, отнюдь, вопреки, тот, кто, тот кто, кто
        (?:думает|считает|скажет|напишет), не верьте, не вздумайте, остерега\w*, (?<!не )сомнева\w*, (?<!без
        )сомнени\w*, сомнит\w*, хотят услышать, хочет услышать, по другому, по-другому, шансы, пятьдесят на пятьдесят,
        не засчита\w*, не успел\w*, не смог\w*, не удалось, в интернете, для галочки, лишь бы, чтобы что-то, не факт,
        кто знает, наугад, неуверен\w*, вроде, вроде бы, якобы, будто, как будто, кажется, говорят, слышал\w*, по
        слухам, мол, дескать, сказал\w*, шепнул\w*, утвержда\w*, по словам, по мнению, если не ошибаюсь, если память,
        если я не, ручаться, ручаюсь, поручусь, гаранти\w*, поклясться, не провер\w*, не счита[лю]\w*, не вычисл\w*,
        проверьте, перепровер\w*, пересчита\w*, мог сбиться, сбился, впопыхах, судить не берусь, не берусь, на глаз, на
        глазок, наобум, с потолка, пальцем в небо, монетк\w*, кубик\w*, интуици\w*, чутьё, чутье, чутьем,
        предположит\w*, ориентировочно, должно быть, навскидку, на всякий случай, другой ответ, второй ответ, запасной,
        на выбор, выбирайте, любой из, равенство нарушается, одно из двух""",
}  # fmt: skip
_CHINESE = (
    "收回|作废|更正|撤回|撤销|忽略|忘掉|划掉|别当真|别信|别以为|千万别|不要相信|错|误|荒谬|胡说|瞎|蒙的|蒙一|乱猜|骗|陷阱|谎|假的|笑话|太阳就?从西边|"
    "绝不|决不|并不|远非|怎么可能|谁(?:要是|会|说|知道)|要是.{0,8}真|听(?:同学|人|朋友|老师|别人)?说|据说|传说|据称|所谓|号称|好像|似乎|貌似|没准|没把握|不敢|"
    "不保证|不清楚|不放心|没(?:有)?(?:验算|检查|验证|核对|计算|算过|算完)|未经|请.{0,4}(?:核对|复查|验算|检查)|凭感觉|凭直觉|直觉|抛硬币|掷骰|拍脑袋|随口|记得好像|记错|"
    "另一个答案|第二个答案|备用|备选|任选|二选一|两个里面|要么|也行|站不住脚|对不上|那就算|有人说|有人认为|网上|来不及|没做完|没时间|凑数|随便|填个|姑且|暂且|只好|算不出|未必|也可以算|看着办|自己判断|同学(?:说|告诉)|朋友(?:说|告诉)"
)


def _alternatives(words: str) -> str:
    return "|".join(" ".join(word.split()) for word in re.split(r",\s+", words) if word.strip())


_STANCE = re.compile(rf"(?<!\w)(?:{'|'.join(map(_alternatives, _WORDS.values()))})(?!\w)|{_CHINESE}")
SHORTEST = 4
"""letters; shorter words are not compared with the problem's"""
_LETTERS = re.compile(r"[^\W\d_]+")


def steps_back(text: str, problem: str = "") -> str:
    """Return the first words of a text, in lower case, by which its writer steps back; "" where there are none."""
    known = set(_LETTERS.findall(problem))
    for found in _STANCE.finditer(text):
        words = [word for word in _LETTERS.findall(found.group()) if len(word) >= SHORTEST]
        if not words or not known.issuperset(words):
            return found.group()
    return ""
