"""Turn the settings into files: the model folder, training and validation problems, demonstrations.

"tiny" and "stories" are made on the spot in the run's folder (quickstart); everything else is a path or a Hub id. Of
the weights only the headers are read, so that a damaged or foreign file is reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from shared.config import Config
from shared.errors import DataError, ModelError
from shared.model import hf
from shared.model.config import DecoderConfig
from shared.progress import Progress
from trainer.objectives.objective import Need
from trainer.objectives.registry import needs, objective_of


@dataclass(frozen=True)
class Sources:
    """The files and model folders that a run reads; all exist."""

    model_dir: Path
    train: Path
    validation: Path | None
    demonstrations: Path | None
    general: Path | None
    teacher_dir: Path | None = None
    """model folder of a teacher that runs in the trainers"""


def gather_sources(config: Config, progress: Progress) -> Sources:
    """Resolve every path, making the quickstart's files where asked. Raises ModelError or DataError."""
    made = None
    if "stories" in (config.data.train, config.data.validation, config.sft.demonstrations) or (
        config.model.path == "tiny"
    ):
        from trainer.quickstart import prepare

        progress.phase("making the quickstart's problems and model")
        made = prepare(config)

    def find(setting: str, value: str, own: Path | None) -> Path | None:
        if value == "stories":
            return own
        if not value:
            return None
        if not Path(value).is_file():
            raise DataError(f"{setting} = '{value}': there is no such file")
        return Path(value)

    train = find("data.train", config.data.train, made.train if made else None)
    if train is None:
        raise DataError('data.train is empty: give a JSONL file of problems, or "stories"')
    model_dir = made.model if made and config.model.path == "tiny" else hf.resolve(config.model.path)
    hf.check_trainable(model_dir)
    check_vocabulary(model_dir)
    teacher, teacher_dir = objective_of(config), None
    if Need.TEACHER in needs(config) and not teacher.served_teacher:
        teacher_dir = hf.resolve(teacher.teacher or "", "objective.teacher")
        hf.check_trainable(teacher_dir)
        check_tokenizers(model_dir, teacher_dir)
    return Sources(
        model_dir=model_dir,
        train=train,
        validation=find("data.validation", config.data.validation, made.validation if made else None),
        demonstrations=find("sft.demonstrations", config.sft.demonstrations, made.demonstrations if made else None),
        general=find("sft.general", config.sft.general, None),
        teacher_dir=teacher_dir,
    )


def check_vocabulary(model_dir: Path) -> None:
    """Raise ModelError if the tokenizer has tokens that the embedding has no row for."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return  # other forms of tokenizers are read, and their absence told, by shared.chat.Chat
    try:
        most = max(Tokenizer.from_file(str(path)).get_vocab().values(), default=-1)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{path} cannot be read ({error}): fetch the file again") from error
    rows = DecoderConfig.from_hf(hf.load_config(model_dir)).vocab_size
    if most >= rows:
        raise ModelError(
            f"{path} has tokens up to id {most}, config.json has vocab_size = {rows}: the model has no row for the "
            "last ones. Take the tokenizer that came with the model, or resize the model's embedding"
        )


def check_tokenizers(model_dir: Path, teacher_dir: Path) -> None:
    """Raise ModelError if the teacher has another tokenizer or fewer rows of token ids than the model: its log-probs
    would be of other texts, or missing."""
    folders = (model_dir, teacher_dir)
    for folder in folders:
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(f"objective.teacher: {folder} has no tokenizer.json to compare with the other model's")
    own, other = (Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab() for folder in folders)
    if different := [token for token in own.keys() | other.keys() if own.get(token) != other.get(token)]:
        raise ModelError(
            f"objective.teacher: {teacher_dir} has another tokenizer than {model_dir} ({len(different)} tokens differ, "
            f"for example {min(different)!r}): a teacher must read the same token ids"
        )
    rows, known = (DecoderConfig.from_hf(hf.load_config(folder)).vocab_size for folder in folders)
    if known < rows:
        raise ModelError(
            f"objective.teacher: {teacher_dir} has {known} rows of token ids, {model_dir} has {rows}: it says nothing "
            "of the last ones, which the policy may sample; take a teacher with as many"
        )
