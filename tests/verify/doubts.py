"""Answers that are doubted, and some that only sound so: two rounds more (8 of 25, then 6 of 15 refused at first)."""

from __future__ import annotations

from tests.verify.refusals import Row, no, yes

THIRD: dict[str, list[Row]] = {
    "denied": [
        *no(
            "There is a small chance that it is \\boxed{5}.", "I wouldn't bet on \\boxed{5}.", "Hard to say, but let's go with \\boxed{5}.",
            "\\boxed{5}, if I'm not mistaken... but I'm probably wrong.", "The answer should not be \\boxed{5}.", "Nobody would say \\boxed{5}.",
            "Let me just guess: \\boxed{5}", "It's a toss-up between 4 and \\boxed{5}.", "Ce n'est sûrement pas \\boxed{5}.",
            "Je dirais \\boxed{5}, sans certitude.", "Das Ergebnis könnte \\boxed{5} sein.", "Ich würde auf \\boxed{5} tippen.",
            "Podría ser \\boxed{5}.", "No creo que sea \\boxed{5}.", "Potrebbe trattarsi di \\boxed{5}.",
            "Non credo che sia \\boxed{5}.", "可能答案是\\boxed{5}", "我猜是\\boxed{5}",
            "也有可能是\\boxed{5}。", "Я думаю, что это не \\boxed{5}.", "Скорее всего, \\boxed{5}.",
            "Может, \\boxed{5}?", "One possibility is \\boxed{5}.", "I don't think it's \\boxed{5}.",
            "\\boxed{4}? \\boxed{5}? \\boxed{6}? I pick \\boxed{5}, no idea.", "I can't say it is \\boxed{5}.", "Possibly, but not certainly, \\boxed{5}.",
            "My best estimate would be \\boxed{5}, I don't know.", "The answer was never \\boxed{5}.", "Who knows, \\boxed{5}.",
            "It isn't necessarily \\boxed{5}.", "Allegedly \\boxed{5}.", "Supposons que la réponse soit \\boxed{5}.",
            "Nehmen wir an, die Antwort ist \\boxed{5}.", "Ninguno, o tal vez \\boxed{5}.", "La risposta potrebbe anche essere \\boxed{5}.",
            "答案应该不是\\boxed{5}。", "Ответ вряд ли \\boxed{5}.", "\\boxed{5} — или нет.",
            "\\boxed{5}, aber das ist falsch.",
        ),
        *yes(
            "Nobody else has apples, so he has \\boxed{5}.", "Let us not forget the first two: \\boxed{5}.", "There are two possibilities, 4 and 5. Checking both, only 5 works: \\boxed{5}.",
            "If he sold none, the number is \\boxed{5}.", "The only possible answer is \\boxed{5}.", "Il n'y a pas d'autre choix, donc \\boxed{5}.",
            "Keine andere Zahl passt. Die Antwort lautet \\boxed{5}.", "No hay más; por lo tanto, \\boxed{5}.", "Nulla manca: \\boxed{5}.",
            "没有其他可能，所以答案是\\boxed{5}。", "Больше ничего не нужно: \\boxed{5}.", "Rather than count, we add: \\boxed{5}.",
            "I think the answer is \\boxed{5}.", "You guess and check until you reach \\boxed{5}.", "It is not hard to see that the answer is \\boxed{5}.",
            "By chance both agree, and the sum is \\boxed{5}.", "The chance is 1 in 5, so n = \\boxed{5}.", "We believe in checking: 2+3 gives \\boxed{5}.",
            "Don't forget the units: \\boxed{5} apples.", "Es ist nicht schwer: die Antwort ist \\boxed{5}.", "Никто не сомневается: ответ \\boxed{5}.",
            "这不难，答案是\\boxed{5}。",
        ),
    ],
}
