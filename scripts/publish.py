"""A folder that others may see: its model card, what must not be in it, and the upload to the Hub."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.proof import say
from utils import ConfigError, redact

ROOT = Path(__file__).resolve().parents[1]
OWN_LICENCES = (  # of Qwen's own repositories, from their model cards; the first pattern that fits
    (r"Qwen/Qwen2\.5-3B(-\w+)*", "qwen-research"),
    (r"Qwen/Qwen2\.5-72B(-\w+)*", "qwen"),
    (r"Qwen/Qwen(2\.5|3)-[\w.]+B(-\w+)*", "apache-2.0"),
)
RESEARCH_ONLY = re.compile(r"research|non-?commercial|(^|-)nc(-|$)", re.IGNORECASE)
VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")  # the base's words, among them things like /home
PLACES = re.compile(r"(?<![\w:/.<-])/(home|root|Users|tmp|mnt|media|opt|srv|var|data|scratch|workspace|content)/")
PRIVATE_KEYS = ("env_url", "env_image", "env_host", "vllm_base_url")  # servers, perhaps with a password in the address


class PublishError(RuntimeError):
    """What keeps a folder from being published, in one line."""


# ----------------------------------------------------------------------------------------------------------- licence


def public_name(model: str) -> str:
    """A model's name on the Hub, or the last part of a local path."""
    return Path(model).name if Path(model).is_absolute() or Path(model).is_dir() else model


def licence_of(base: str, revision: str | None = None) -> str | None:
    """The licence a base is under: Qwen's own from a table, others from their model card; None: nobody says."""
    for pattern, licence in OWN_LICENCES:
        if re.fullmatch(pattern, base):
            return licence
    from huggingface_hub import ModelCard, hf_hub_download

    try:
        local = Path(base) / "README.md"
        path = local if Path(base).is_dir() else Path(hf_hub_download(base, "README.md", revision=revision))
        data = ModelCard.load(path).data
    except Exception:  # no card, no network, a card that is no card: all the same here
        return None
    return getattr(data, "license_name", None) or data.license


def licence_warning(base: str, licence: str | None) -> str | None:
    """What somebody who publishes or uses the model must know about its licence, where that is not a free one."""
    name = public_name(base)
    if licence is None:
        return f"The licence of {name} is not known here: read its terms before you use or publish this model."
    if RESEARCH_ONLY.search(licence):
        return f"{name} is under {licence}, which allows research only, and so is this model: no commercial use."
    return None


# -------------------------------------------------------------------------------------------------------------- card


@dataclass(frozen=True)
class Published:
    """What a model card tells about."""

    repo: str  # as in the card's examples
    base: str
    licence: str | None
    config: SimpleNamespace  # of the run
    checkpoint: str  # the folder's name
    summary: dict[str, Any] | None  # the run's summary.json
    report: dict[str, Any] | None  # of the merge; None: this is the adapter


def card(about: Published) -> str:
    """The README.md: front matter for the Hub, use, training, evaluation, proof of the merge, licence."""
    chapters = [_front_matter(about), _opening(about), _use(about), _training(about), _evaluation(about)]
    if about.report:
        chapters.append(_merge(about.report))
    warning = licence_warning(about.base, about.licence)
    chapters.append(f"## Licence\n\n{f'**{warning}**' if warning else f'That of the base: {about.licence}.'}")
    return redact("\n\n".join(chapters)) + "\n"


def _front_matter(about: Published) -> str:
    library, relation = ("transformers", "finetune") if about.report else ("peft", "adapter")
    tags = ["ppo", "games", *(["openspiel"] if about.config.env.env_type == "openspiel" else ["code"])]
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation", f"tags: [{', '.join(tags)}]"]
    if about.licence in ("apache-2.0", "mit"):
        lines.append(f"license: {about.licence}")
    elif about.licence:
        lines += ["license: other", f"license_name: {about.licence}"]
    if public_name(about.base) == about.base:
        lines += [f"base_model: {about.base}", f"base_model_relation: {relation}"]
    return "\n".join([*lines, "---"])


def _games(config: SimpleNamespace) -> list[str]:
    from curriculum import pool
    from games import GAMES

    if config.env.env_type != "openspiel":
        return []
    return [GAMES[i].name for i in sorted({i for stage in config.curriculum.stages for i in pool(stage.games)})]


def _opening(about: Published) -> str:
    what = "A LoRA adapter for" if not about.report else "A chat model made from"
    games = _games(about.config)
    task = f"to play {', '.join(games)}" if games else "to predict what Python programs print"
    return (f"# {about.repo.rpartition('/')[2]}\n\n{what} {public_name(about.base)}, trained {task} by PPO with a "
            f"learned critic, a decision at a time. It is {about.checkpoint} of its run.")  # fmt: skip


def _use(about: Published) -> str:
    base = public_name(about.base)
    load = [f'tokenizer = AutoTokenizer.from_pretrained("{about.repo}")',
            f'model = AutoModelForCausalLM.from_pretrained("{about.repo}", dtype="auto")']  # fmt: skip
    if not about.report:
        load[1] = f'model = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto")'
        load.append(f'model = PeftModel.from_pretrained(model, "{about.repo}")')
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    imports = [*([] if about.report else ["from peft import PeftModel"]), *imports]
    asked = "tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)"
    note = {
        "constrained": "It was trained choosing among the legal ids only. Without that constraint it may answer "
        "something else; the project's `scripts/evaluate.py` and `scripts/play.py` apply it.",
        "free": "It was trained on free answers, which are then parsed.",
    }[about.config.env.answer_mode]
    code = "\n".join([*imports, "", *load, f"ids = {asked}"])
    messages = {
        "full": "A system message holds the rules, each user message a state with its legal actions",
        "compact": "The system message is the game's name, each user message a position in few tokens (`games/`)",
    }[about.config.env.prompt]
    return f"## Use\n\n```python\n{code}\n```\n\n{messages}; the answer is an action's id alone. {note}"


def public_config(config: SimpleNamespace) -> dict[str, Any]:
    """The configuration that others may see: no addresses, no paths, nothing about the machine."""
    sections = {name: asdict(part) for name, part in vars(config).items() if name != "run"}
    for key in ("model_name", "adapter"):
        if sections["model"][key]:
            sections["model"][key] = public_name(sections["model"][key])
    sections["model"].pop("device")
    for key in PRIVATE_KEYS:
        sections["env"].pop(key, None)
    return sections


def _training(about: Published) -> str:
    config, ppo = about.config, about.config.ppo
    held = "4-bit " + config.model.bnb_4bit_quant_type if config.model.use_4bit else config.model.dtype
    stages = [f"{s.name} against {' and '.join(s.mixture)}" for s in config.curriculum.stages]
    data = ("No data set: the model played, and every position it learnt from came up in its own games."
            if _games(config) else "Python programs, run in a sandbox for the true output.")  # fmt: skip
    return "\n".join([
        "## Training", "",
        f"{data} Stages: {', '.join(stages)}.", "",
        "| | |", "|---|---|",
        f"| base | {public_name(about.base)}, {held} |",
        f"| adapter | LoRA r {config.lora.r}, alpha {config.lora.lora_alpha}, on {len(config.lora.target_modules)} "
        "kinds of linear layers |",
        f"| steps | up to {ppo.num_train_steps:,} of {ppo.batch_size} games, epochs a step: {ppo.ppo_epochs} |",
        f"| learning rate | {ppo.learning_rate:g} |",
        f"| KL penalty | {ppo.init_kl_coef:g} a nat at first, target {ppo.target:g} a decision |",
        f"| prompt, answers | {config.env.prompt}, {config.env.answer_mode} |",
        f"| seed | {config.run.seed} |", "",
        "<details><summary>Everything</summary>", "",
        f"```json\n{json.dumps(public_config(config), indent=1)}\n```", "", "</details>",
    ])  # fmt: skip


def _evaluation(about: Published) -> str:
    summary = about.summary
    if not summary:
        return "## Evaluation\n\nThe run holds none: it did not reach its end."
    if about.checkpoint not in (summary.get("checkpoint"), "final"):
        return f"## Evaluation\n\nNone of this checkpoint; its run was evaluated as {summary.get('checkpoint')}."
    lines = [
        "## Evaluation", "",
        "Mean result of sampled play against a uniform random opponent, from -1 to 1, both seats, on seeds that "
        "training never used; *share* is where the exact value lies between random play (0) and the best response "
        "(1).", "",
        "| game | before | after | 95 % | games | exact | best response | share |",
        "|---|--:|--:|:-:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for game, r in summary["games"].items():
        exact, ceiling, share = (
            "-" if r[key] is None else f"{r[key]:.3f}" for key in ("exact_after", "ceiling", "share")
        )
        lines.append(f"| {game} | {r['before']:+.3f} | {r['after']:+.3f} | [{r['interval'][0]:+.3f}, "
                     f"{r['interval'][1]:+.3f}] | {r['episodes']} | {exact} | {ceiling} | {share} |")  # fmt: skip
    return "\n".join(lines)


def _merge(report: dict[str, Any]) -> str:
    made, proof = report["made_of"], report["proof"]
    weights = {"dequantised": "the base as it was in training, its quantised weights dequantised",
               "original": "the base's original weights"}[made["base_weights"]]  # fmt: skip
    lines = [f"The adapter was added to {weights}, and saved as {made['dtype']}. Compared with the two apart: "
             f"{say(proof)}"]  # fmt: skip
    if report.get("moved"):
        lines.append(f"Compared with the model that was trained, on the quantised base: {say(report['moved'])}")
    return "## Merge\n\n" + "\n\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ upload


def published_files(folder: Path) -> list[Path]:
    """All files of a folder, by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def check_public(folder: Path) -> None:
    """Raise PublishError where a file holds a secret of the environment or a path of this machine."""
    own = "|".join(re.escape(str(p)) for p in {Path.home(), Path.cwd(), ROOT} if len(p.parts) > 1)
    machine = re.compile(rf"(?<![\w.-])({own})(?![\w-])") if own else PLACES
    for path in published_files(folder):
        if path.suffix == ".safetensors" or path.name in VOCABULARY:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if redact(text) != text:
            raise PublishError(f"{path}: holds a secret that stands in the environment; remove it before publishing")
        if found := machine.search(text) or PLACES.search(text):
            line = text.count("\n", 0, found.start()) + 1
            raise PublishError(f"{path}: line {line} holds a path of this machine; remove it before publishing")


def check_repo(repo: str) -> None:
    """Raise ConfigError for a name the Hub does not take."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--push {repo}: {' '.join(str(error).split())}") from error
    if repo.count("/") != 1:
        raise ConfigError(f"--push {repo}: expected OWNER/NAME")


def who_uploads() -> str:
    """The account that uploads would be made from.

    Raises:
        ConfigError: not logged in, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        return HfApi().whoami()["name"]
    except Exception as error:
        cause = " ".join(str(error).split())[:200]
        raise ConfigError(f"--push: no access to the Hub ({cause}); `hf auth login` gives it") from error


def upload(folder: Path, repo: str, private: bool) -> str:
    """Upload a folder, its repository made where there is none; return the address.

    Raises:
        PublishError: what the Hub said.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        info = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload model and card")
    except Exception as error:
        raise PublishError(redact(f"--push {repo}: {' '.join(str(error).split())[:300]}")) from error
    return str(info.commit_url)
