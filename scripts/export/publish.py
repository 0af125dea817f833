"""Publishing a folder: the model card, the search for secrets and paths, and the upload to the Hub."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.utils import HFValidationError, validate_repo_id

from config.reader import blaming, printable
from curriculum import first_tasks, pool
from env_wrapper import make_env
from envs.client import one_line
from envs.types import Task
from evaluation.tables import VALUE, between, columns, less_luck, shown_share
from games import GAMES
from policy.model import folder_of
from scripts.export.proof import say
from training.process import ROOT, ProgramError
from utils import ConfigError, redact

TEMPLATE = Path(__file__).with_name("card.md")
QWEN_LICENCES = (  # of Qwen's own repositories, from their model cards; the first pattern that matches
    (r"Qwen/Qwen2\.5-3B(-\w+)*", "qwen-research"),
    (r"Qwen/Qwen2\.5-72B(-\w+)*", "qwen"),
    (r"Qwen/Qwen(2\.5|3)-[\w.]+B(-\w+)*", "apache-2.0"),
)
RESEARCH_ONLY = re.compile(r"research|non-?commercial|(^|-)nc(-|$)", re.IGNORECASE)
VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")  # the base's tokens, which may look like paths
PLACES = re.compile(r"(?<![\w:/.<-])/(home|root|Users|tmp|mnt|media|opt|srv|var|data|scratch|workspace|content)/")
LOADED = re.compile(r"(adapter_)?config\.json|[^/]+\.(safetensors|bin)(\.index\.json)?")  # what makes a player
PRIVATE_KEYS = ("env_url", "env_image", "vllm_base_url", "games_path")  # may hold passwords or paths
MARK = "\n<!-- written by merge.py, which keeps this file if it is edited: "


# ----------------------------------------------------------------------------------------------------------- licence


def public_name(model: str) -> str:
    """A model's name on the Hub, or the last part of a local path, which may be one of another machine."""
    return Path(model).name if model.startswith((".", "/", "~", "models/")) or folder_of(model) else model


def licence_of(base: str, revision: str | None = None) -> str | None:
    """A base's licence, from the table above or the base's model card; None: unknown."""
    for pattern, licence in QWEN_LICENCES:
        if re.fullmatch(pattern, base):
            return licence
    try:
        folder = folder_of(base)
        path = folder / "README.md" if folder else Path(hf_hub_download(base, "README.md", revision=revision))
        data = ModelCard.load(path).data
    except Exception:  # no card, a damaged one, or no network
        return None
    found = getattr(data, "license_name", None) or data.license
    return printable(found) if isinstance(found, str) else None


def licence_warning(base: str, licence: str | None) -> str | None:
    """What users of the model must know about its licence where that is unknown or allows research only, else None."""
    name = public_name(base)
    if licence is None:
        return f"The licence of {name} is not known here: read its terms before you use or publish this model."
    if RESEARCH_ONLY.search(licence):
        return f"{name} is under {licence}, which allows research only, and so is this model: no commercial use."
    return None


# -------------------------------------------------------------------------------------------------------------- card


@dataclass(frozen=True)
class Published:
    """What a model card is made from."""

    repo: str  # as in the card's examples
    base: str
    licence: str | None
    config: SimpleNamespace  # by which it plays: that of the run, with --set laid over it
    checkpoint: str  # the folder's name
    summary: dict[str, Any] | None  # the run's summary.json
    evaluated: dict[str, dict[str, Any]]  # game -> result
    report: dict[str, Any] | None  # of the merge; None: this is the adapter
    teacher: str | None = None  # whose answers a warm start was taught; None: it was trained by PPO
    changed: Sequence[str] = ()  # keys that --set laid over the run's: it was not trained with these values
    trained: SimpleNamespace | None = None  # the run's own configuration; None: ``config``


def evaluated(summary: Any, file: Path, checkpoint: str) -> dict[str, dict[str, Any]]:
    """Game -> result, where the summary of a run, from a file, is that of this checkpoint.

    ConfigError: it lacks what a card shows.
    """
    malformed = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
    with blaming(f"{file}: is no summary of a run: ", malformed):
        games = summary.get("games", {}) if checkpoint in (summary.get("checkpoint"), "final") else {}
        _evaluation(games)
        "".join(games).encode()
        sum(round(r["after"], 4) for r in games.values())
        sum(_legal_rates(games).values())
    return games


def _legal_rates(games: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Share of free answers that were legal, of the games in which there were any."""
    found = {game: r["free_play"]["legal_rate"] for game, r in games.items() if r.get("free_play")}
    return {game: rate if rate == 1 else min(rate, 0.999) for game, rate in found.items() if rate is not None}


def card(about: Published) -> str:
    """The README.md: front matter for the Hub, use, training, evaluation, proof of the merge, licence."""
    trained = about.trained or about.config
    filled = ModelCard.from_template(
        _card_data(about), str(TEMPLATE), about=about, base=public_name(about.base), task=_task(trained), say=say,
        evaluation=_evaluation(about.evaluated), settings=json.dumps(public_config(about.config), indent=1),
        free=_legal_rates(about.evaluated), trained=trained,
        warning=licence_warning(about.base, about.licence), **_example(about.config), **vars(about.config),
    )  # fmt: skip
    return _marked(redact(str(filled)).rstrip() + "\n")


def _marked(text: str) -> str:
    return f"{text}{MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def is_unchanged(text: str) -> bool:
    """Whether a card still is as ``card`` wrote it."""
    return text == _marked(text.rpartition(MARK)[0])


def _card_data(about: Published) -> Any:
    library, relation = ("transformers", "finetune") if about.report else ("peft", "adapter")
    licence, listed = about.licence, about.licence in ("apache-2.0", "mit")  # others go into license_name
    on_hub = public_name(about.base) == about.base
    boards = about.config.env.env_type == "openspiel"
    value = "mean value against uniform random, -1 to 1" if boards else "2 * mean score - 1"
    results = [
        EvalResult("text-generation", "openspiel" if boards else "trace", game, "value", round(found["after"], 4),
                   metric_name=value, dataset_config=game)  # without dataset_config all games would be merged
        for game, found in about.evaluated.items() if not about.changed  # there are no words beside these
    ]  # fmt: skip
    return ModelCardData(
        base_model=about.base if on_hub else None, base_model_relation=relation if on_hub else None,
        eval_results=results or None, library_name=library, license=licence if listed or not licence else "other",
        license_name=None if listed else licence, model_name=about.repo.rpartition("/")[2],
        pipeline_tag="text-generation",
        tags=[*["ppo"] * (not about.teacher), "games", "openspiel" if boards else "code"],
    )  # fmt: skip


def _example(config: SimpleNamespace) -> dict[str, str]:
    """Python literals of the first position of the run's first game: ``messages``, and ``legal`` actions or ""."""
    env, first = replace(config.env, env_mode="local"), first_tasks(config.curriculum, config.env.env_type)[0]
    if env.env_type == "trace" and env.trace.get("source", "generator") != "generator":  # one's own are not published
        env, first = replace(env, trace={}), 0
    step = make_env(env).reset(Task(first, seed=0))
    contents = [("system", step.info["system"]), ("user", step.text)]
    lines = [f"    {json.dumps({'role': role, 'content': text})},\n" for role, text in contents if text]
    legal = repr(step.legal) if step.legal and config.env.answer_mode == "constrained" else ""
    return {"messages": f"[\n{''.join(lines)}]", "legal": legal}


def _task(config: SimpleNamespace) -> str:
    if config.env.env_type != "openspiel":
        return "predict what Python programs print"
    played = sorted({i for stage in config.curriculum.stages for i in pool(stage.games)})
    return f"play {', '.join(GAMES[i].name for i in played)}"


def public_config(config: SimpleNamespace) -> dict[str, Any]:
    """The run's configuration without addresses, paths and anything else about the machine."""
    sections = {name: asdict(part) for name, part in vars(config).items() if name != "run"}
    for key in ("model_name", "adapter"):
        if sections["model"][key]:
            sections["model"][key] = public_name(sections["model"][key])
    if source := sections["env"]["trace"].get("source"):
        sections["env"]["trace"] |= {"source": public_name(source)}
    sections["model"].pop("device")
    for key in PRIVATE_KEYS:
        sections["env"].pop(key, None)
    return sections


def _evaluation(games: dict[str, dict[str, Any]]) -> str:
    """The table of results, without columns that say nothing of any game, as exact values of programs."""
    lines = [{"game": game, "before": r["before"], "after": r["after"], "95 %": between(*r["interval"]),
              "games": r["episodes"],
              "less luck": less_luck(r.get("adjusted"), r.get("adjusted_interval"), r["exact_after"]),
              "exact": r["exact_after"], "best response": r["ceiling"],
              "share": shown_share(r["share"], r.get("share_interval")), "failed": r.get("failed")}
             for game, r in games.items()]  # fmt: skip
    values = dict.fromkeys(("before", "after", "exact", "best response"), VALUE)
    return columns(lines, "pipe", **values) if lines else ""


# ------------------------------------------------------------------------------------------------------------ upload


def published_files(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def check_public(folder: Path) -> None:
    """Raise ProgramError where a file holds a secret from the environment or a path of this machine."""
    own = "|".join(re.escape(str(p)) for p in {Path.home(), Path.cwd(), ROOT} if len(p.parts) > 1)
    machine = re.compile(rf"(?<![\w.-])({own})(?![\w-])") if own else PLACES
    for path in published_files(folder):
        if path.suffix == ".safetensors" or path.name in VOCABULARY:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if redact(text) != text:
            raise ProgramError(f"{path}: holds a secret from an environment variable; remove it before publishing")
        if found := machine.search(text) or PLACES.search(text):
            line = text.count("\n", 0, found.start()) + 1
            raise ProgramError(f"{path}: line {line} holds a path of this machine; remove it before publishing")


def check_repo(repo: str) -> None:
    """Raise ConfigError for a name that the Hub does not accept."""
    with blaming(f"--push {repo}: ", HFValidationError):
        validate_repo_id(repo)
    if repo.count("/") != 1:
        raise ConfigError(f"--push {repo}: expected OWNER/NAME")


def who_uploads() -> str:
    """The account that would upload; ConfigError: not logged in, or the Hub cannot be reached."""
    try:
        return HfApi().whoami()["name"]
    except Exception as error:  # the client's own errors, HTTP's or the network's
        told = one_line(redact(str(error)))  # redacted first: a secret that is cut in two is not known again
        raise ConfigError(f"--push: no access to the Hub ({told}); `hf auth login` gives it") from error


def _check_leftovers(found: Any, folder: Path) -> None:
    # An upload leaves them there, and transformers would load them as well: an adapter onto the merged model, say. They
    # may be all that somebody has of that model, so they are named instead of deleted.
    names = sorted(file.rfilename for file in found.siblings or ())
    if others := [name for name in names if LOADED.fullmatch(name) and not (folder / name).exists()]:
        allowed = "delete them there or choose another name"
        raise ProgramError(f"holds files of another model; {allowed}: {', '.join(others)}")


def upload(folder: Path, repo: str, private: bool) -> str:
    """Upload a folder, creating the repository if needed; return the commit's URL.

    ProgramError: the Hub refused, or the repository that exists is public or holds files of another model.
    """
    api = HfApi()
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)  # None: as its organisation's repositories are
        found = api.model_info(repo)
        if private and not found.private:  # the Hub ignores --private where the repository exists
            raise ProgramError("exists already and is public; make it private there or choose another name")
        _check_leftovers(found, folder)
        info = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload model and card")
    except Exception as error:  # as in ``who_uploads``
        raise ProgramError(f"--push {repo}: {one_line(redact(str(error)), 300)}") from error
    return str(info.commit_url)
