"""How good a player is, with intervals: every player compared gets the same deals, in both seats.

    python scripts/evaluate.py --checkpoint runs/tiny                         against uniform random, 200 games a game
    python scripts/evaluate.py --checkpoint runs/tiny --opponent mcts:50x1 --games tic_tac_toe hex#1 --exact
    python scripts/evaluate.py --compare runs/tiny base                       is it better than the model it began as?
    python scripts/evaluate.py --ladder --checkpoint runs/tiny                ratings among base, bots and checkpoints
    python scripts/evaluate.py --model Qwen/Qwen3-4B --protocol affinetes     as the public environment scores
    python scripts/evaluate.py --model NAME --base_url http://127.0.0.1:8000/v1

A player is named by the directory of a checkpoint or of a run (its latest checkpoint), ``base``, a bot (random, mcts,
mcts_light, mcts:SIMSxROLLOUTS, ismcts) or the http(s) address of an OpenAI-compatible server. A success is a score
above 0.5.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from curriculum import TaskRange
from evaluation import exact_table, game_sets, paired_tasks, table_values
from intervals import mean_interval, pair_means, paired_difference, wilson
from runlog import Console, setup_logging
from scripts.arena import Arena, EpisodeLog, Row
from scripts.players import AFFINETES, Contestant, Roster, ServerError
from utils import CheckpointError, ConfigError, redact

LADDER_BOTS = ("random", "mcts:10x1", "mcts:50x1", "mcts:200x1")
OVERALL = "overall"


class EvaluationError(RuntimeError):
    """Nothing to report: told in one line, exit code 1."""


# ----------------------------------------------------------------------------------------------------------- results


def summary(game: str, rows: Sequence[Row]) -> dict[str, Any]:
    """One line of the table: rates with Wilson intervals, the mean score with one over pairs of seats, counts."""
    return _summary(game, [list(rows)])


def overall(by_game: dict[str, list[Row]]) -> dict[str, Any]:
    """The line below: the mean over games, each with the same weight."""
    return _summary(OVERALL, list(by_game.values()))


def _summary(game: str, strata: list[list[Row]]) -> dict[str, Any]:
    rows = [row for stratum in strata for row in stratum]
    scores = [row["score"] for row in rows if row["score"] is not None]
    counts = {o: sum(row["outcome"] == o for row in rows) for o in ("truncated", "forfeited", "failed")}
    result: dict[str, Any] = {"game": game, "episodes": len(scores), **counts}
    if not scores:
        return result
    units = [pair_means([row["score"] for row in stratum]) for stratum in strata]
    score = mean_interval([u for u in units if len(u)], len(scores))
    outcomes = {"success": [s > 0.5 for s in scores], "draw": [s == 0.5 for s in scores],
                "loss": [s < 0.5 for s in scores]}  # fmt: skip
    for name, hits in outcomes.items():
        rate = wilson(sum(hits) / len(hits), len(hits))
        result |= {name: rate.estimate, f"{name}_interval": [rate.low, rate.high]}
    masses = [(row["legal_mass"], row["decisions"]) for row in rows if row.get("legal_mass") is not None]
    decisions = sum(n for _, n in masses)
    return result | {
        "score": score.estimate, "score_interval": [score.low, score.high],
        "legal_mass": sum(mass * n for mass, n in masses) / decisions if decisions else None,
        "retries": sum(row.get("retries", 0) for row in rows),
    }  # fmt: skip


def exact_results(player: Contestant, task_ids: set[int]) -> dict[str, Any] | None:
    """Exact score against uniform random, the best response's, the share between, NashConv; None: not computable."""
    from envs import exact
    from envs.openspiel import table

    [task_id, *others] = sorted(task_ids)
    shared = table(task_id)
    if any(table(other) is not shared for other in others) or not exact.feasible(shared.spiel):
        return None
    if player.label == "random":
        policy_table = exact.uniform_table(shared.spiel)
    elif hasattr(player.player, "action_probs") and player.env.answer_mode == "constrained":
        policy_table = exact_table(player.player, player.env, task_id) or {}
    else:
        return None
    own, random, best = table_values(policy_table, task_id)
    nash_conv = exact.nash_conv(shared.spiel, policy_table)
    return {"exact": (own + 1) / 2, "random": (random + 1) / 2, "ceiling": (best + 1) / 2,
            "share": exact.share_of_ceiling(own, random, best), "nash_conv": nash_conv}  # fmt: skip


def differences(ours: dict[str, list[Row]], theirs: dict[str, list[Row]]) -> list[dict[str, Any]]:
    """Per game and overall: what the first player scores above the second on the same deals."""
    units = {}
    for game in ours:
        pairs = zip(ours[game], theirs[game], strict=True)
        scores = [(a["score"], b["score"]) for a, b in pairs]
        deltas = pair_means([a - b if a is not None and b is not None else None for a, b in scores])
        if len(deltas):
            units[game] = deltas
    if not units:
        raise EvaluationError("no deal was played to its end by both players")
    results = []
    every = [(OVERALL, list(units.values()))] if len(units) > 1 else []
    for game, strata in [*((game, [deltas]) for game, deltas in units.items()), *every]:
        found = paired_difference(strata)
        results.append({"game": game, "pairs": sum(map(len, strata)), "difference": found.estimate,
                        "interval": [found.low, found.high], "p": found.p})  # fmt: skip
    return results


# ------------------------------------------------------------------------------------------------------------ tables


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _range(ends: Sequence[float] | None, form: str = ".3f") -> str:
    return "-" if ends is None else f"[{ends[0]:{form}}, {ends[1]:{form}}]"


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in [head, *lines]
    )


def result_lines(results: Sequence[dict[str, Any]], with_exact: bool) -> str:
    """The table of one player."""
    head = ["game", "games", "score", "95 %", "success", "95 %", "draw", "loss", "legal mass", "truncated", "forfeited",
            "failed"]  # fmt: skip
    head += ["exact score", "ceiling", "share", "NashConv"] if with_exact else []
    lines = []
    for r in results:
        line = [r["game"], str(r["episodes"]), _number(r.get("score")), _range(r.get("score_interval")),
                _number(r.get("success")), _range(r.get("success_interval")), _number(r.get("draw")),
                _number(r.get("loss")), _number(r.get("legal_mass"), ".2g"),
                *(str(r[outcome]) for outcome in ("truncated", "forfeited", "failed"))]  # fmt: skip
        exact = r.get("exact") or {}
        line += [_number(exact.get(k)) for k in ("exact", "ceiling", "share", "nash_conv")] if with_exact else []
        lines.append(line)
    return aligned(head, lines)


def difference_lines(results: Sequence[dict[str, Any]]) -> str:
    """The table of a comparison."""
    lines = [[r["game"], str(r["pairs"]), _number(r["difference"], "+.3f"), _range(r["interval"], "+.3f"),
              _number(r["p"], ".4f")] for r in results]  # fmt: skip
    return aligned(["game", "pairs of deals", "difference", "95 %", "p"], lines)


# ----------------------------------------------------------------------------------------------------------- program


class Evaluation:
    """What the command line asks for: the players, the opponent, the games, and where results go."""

    def __init__(self, args: argparse.Namespace) -> None:
        affinetes = args.protocol == "affinetes"
        sets = [*args.set, *(AFFINETES if affinetes else ())]
        self.args = args
        self.roster = Roster(args.config, sets, args.seed, args.greedy, args.model)
        self.names = self._names()
        opponent = args.opponent or ("mcts" if affinetes else "random")
        self.opponent_name = opponent.removeprefix("past:")
        self.rows = self._rows()
        self.players = [self.roster.contestant(name, self.names) for name in self.names]

    def _names(self) -> list[str]:
        args = self.args
        names = list(args.compare or args.ladder or args.checkpoint)
        if args.ladder is not None and not args.ladder:
            names = [*(["base"] if args.checkpoint or args.model else []), *LADDER_BOTS, *args.checkpoint]
        elif args.base_url:
            names.append(args.base_url)
        elif args.model and not names:
            names = ["base"]
        return list(dict.fromkeys(names)) if args.ladder is not None else names

    def _rows(self) -> dict[str, list[TaskRange]]:
        """Line of the table -> tasks, from --games or the run's curriculum."""
        folders = [name for name in self.names if Path(name).is_dir()]
        config = self.roster.config(folders[0] if folders else None)
        wanted = self.args.games or [item for stage in config.curriculum.stages for item in stage.games]
        try:
            rows = game_sets(wanted)
        except ValueError as error:
            raise ConfigError(f"--games: {error}") from error
        if config.env.env_type == "trace":  # its task ids have the same form, and are programs
            return {f"trace {first}-{last}": [(first, last)] for [(first, last)] in rows.values()}
        return rows

    def settings(self, opponents: Sequence[Contestant]) -> dict[str, Any]:
        """All that determines the games, for the head of the file that can be continued."""
        args = self.args
        return {"players": [p.origin | {"label": p.label, "env": vars(p.env)} for p in [*self.players, *opponents]],
                "games": self.rows, "num_episodes": args.num_episodes,
                "seed": args.seed, "greedy": args.greedy, "protocol": args.protocol, "set": args.set,
                "games_at_once": args.games_at_once}  # fmt: skip

    def arena(self, opponents: Sequence[Contestant], matches: int) -> Arena:
        """The place to play ``matches`` times all games."""
        log = EpisodeLog(Path(self.args.output) if self.args.output else None, self.settings(opponents))
        console = Console(matches * len(self.rows) * self.args.num_episodes, stream=sys.stderr)
        return Arena(log, console, self.args.games_at_once)

    def play(self, arena: Arena, own: Contestant, opponent: Contestant) -> dict[str, list[Row]]:
        """Play all games; game -> rows."""
        tasks = paired_tasks(list(self.rows.values()), self.args.num_episodes, self.args.seed, opponent.opponent)
        return {game: arena.play(own, opponent, game, t) for game, t in zip(self.rows, tasks, strict=True)}

    def run(self) -> dict[str, Any]:
        """Evaluate every player against the opponent; compare the two of ``--compare``."""
        opponent = self.roster.contestant(self.opponent_name, self.names)
        arena = self.arena([opponent], len(self.players))
        played = []
        try:
            played = [self.play(arena, player, opponent) for player in self.players]
        finally:
            arena.console.close()
        sampling = "greedy" if self.args.greedy else "sampled"
        report: dict[str, Any] = {"settings": self.settings([opponent]), "tables": []}
        for player, rows in zip(self.players, played, strict=True):
            results = self._results(player, rows)
            report["tables"].append({"player": player.label, "opponent": opponent.label, "results": results})
            print(f"{player.label} against {opponent.label}, {sampling}, seed {self.args.seed}")
            print(result_lines(results, self.args.exact), end="\n\n")
        if self.args.compare:
            report["comparison"] = differences(*played)
            print(f"{self.players[0].label} minus {self.players[1].label}, score on the same deals")
            print(difference_lines(report["comparison"]), end="\n\n")
        return report

    def _results(self, player: Contestant, rows: dict[str, list[Row]]) -> list[dict[str, Any]]:
        results = [summary(game, played) for game, played in rows.items()]
        lost = next((r["game"] for r in results if not r["episodes"]), None)
        if lost:
            raise EvaluationError(f"every game of {lost} failed; the first: {rows[lost][0]['error']}")
        if self.args.exact:
            for result, played in zip(results, rows.values(), strict=True):
                result["exact"] = exact_results(player, {row["task_id"] for row in played})
        return [*results, overall(rows)] if len(results) > 1 else results

    def ladder(self) -> dict[str, Any]:
        """Play everyone against everyone and rate them, over all games and in each."""
        from envs.openspiel import table
        from envs.ratings import rate

        for game, [(first, _)] in self.rows.items():
            if table(first).players != 2:
                raise ConfigError(f"--ladder: {game} is not for two players; choose others with --games")
        players = self.players
        pairs = [(i, j) for i in range(len(players)) for j in range(i + 1, len(players))]
        arena, results = self.arena([], len(pairs)), {}
        try:
            for i, j in pairs:
                a, b = (i, j) if players[i].player is not None else (j, i)  # of a bot and a model the model plays
                played = self.play(arena, players[a], players[b])
                results[a, b] = {game: _outcomes(rows) for game, rows in played.items()}
        finally:
            arena.console.close()
        anchor = next((i for i, p in enumerate(players) if p.label == "random"), 0)
        ratings = {OVERALL: rate({pair: list(r.values()) for pair, r in results.items()}, len(players), anchor)}
        for game in self.rows:
            ratings[game] = rate({pair: [r[game]] for pair, r in results.items()}, len(players), anchor)
        return self._ladder_report(ratings, results)

    def _ladder_report(self, ratings: dict[str, Any], results: dict[tuple[int, int], Any]) -> dict[str, Any]:
        order = sorted(range(len(self.players)), key=lambda i: -ratings[OVERALL][i].points)
        lines = [[self.players[i].label, *(f"{r[i].points:+.0f} [{r[i].low:+.0f}, {r[i].high:+.0f}]"
                                           for r in ratings.values())] for i in order]  # fmt: skip
        print(
            f"Ratings (400 points: odds of 10 to 1) with 95 % intervals, {self.args.num_episodes} games a pair and game"
        )
        print(aligned(["player", *ratings], lines), end="\n\n")
        labels = [player.label for player in self.players]
        matches = [
            {"player": labels[i], "opponent": labels[j], "game": game, "games": int(r.size), "score": float(r.mean())}
            for (i, j), by_game in results.items()
            for game, r in by_game.items()
        ]
        rated = [{"player": labels[i], "ratings": {g: r[i]._asdict() for g, r in ratings.items()}} for i in order]
        return {"settings": self.settings([]), "ladder": rated, "matches": matches}


def _outcomes(rows: Sequence[Row]) -> np.ndarray:
    """Units of a match: 1 won, 0.5 drawn, 0 lost, by pairs of games; pairs with a failed game are left out."""
    scores = np.array([np.nan if row["score"] is None else row["score"] for row in rows]).reshape(-1, 2)
    scores = scores[~np.isnan(scores).any(axis=1)]
    if not len(scores):
        raise EvaluationError(f"every game of {rows[0]['game']} failed; the first: {rows[0].get('error')}")
    return (np.sign(scores - 0.5) + 1) / 2


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", nargs="+", default=[], metavar="PLAYER", help="whom to evaluate")
    add("--compare", nargs=2, metavar="PLAYER", help="evaluate both and test the difference")
    add("--ladder", nargs="*", metavar="PLAYER", help="round robin; default: base, random, mcts and --checkpoint")
    add("--model", metavar="NAME", help="a base model without an adapter, or the model to ask a server for")
    add("--base_url", metavar="URL", help="of an OpenAI-compatible server; its key comes from OPENAI_API_KEY")
    add("--opponent", metavar="PLAYER", help="default random; mcts with --protocol affinetes")
    add("--games", nargs="+", metavar="GAME", help="NAME, NAME#CONFIG, task id or FIRST-LAST; default: the run's")
    add("--num_episodes", type=int, default=200, help="a game, half in each seat (default 200)")
    add("--seed", type=int, default=0, help="of deals and sampling (default 0)")
    add("--greedy", action="store_true", help="the likeliest answer instead of a sampled one")
    add("--exact", action="store_true", help="exact values, share of the ceiling and NashConv of small games")
    add("--protocol", choices=("native", "affinetes"), default="native", help="affinetes: as the public environment")
    add("--output", metavar="FILE.jsonl", help="a row a game; the same command goes on where it was interrupted")
    add("--json", metavar="FILE", help="the tables as JSON")
    add("--games_at_once", type=int, default=128, help="part of what the seed determines (default 128)")
    add("--config", action="append", default=[], metavar="FILE", help="differences to the run's configuration")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. model.use_4bit=false")
    args = parser.parse_args(argv)
    if not (args.checkpoint or args.compare or args.ladder is not None or args.model):
        parser.error("nobody to evaluate: name a --checkpoint or a --model, or use --compare or --ladder")
    if args.num_episodes < 2 or args.num_episodes % 2:
        parser.error(f"--num_episodes {args.num_episodes}: an even number >= 2, half of them for each seat")
    if args.games_at_once < 1:
        parser.error(f"--games_at_once {args.games_at_once}: at least 1")
    if args.base_url and not args.model:
        parser.error("--base_url: --model must name the model that the server is to be asked for")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; exit codes: 0 done, 1 nothing to report, 2 bad usage, 130 interrupted."""
    setup_logging()
    args = arguments(argv)
    try:
        evaluation = Evaluation(args)
        report = evaluation.ladder() if args.ladder is not None else evaluation.run()
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    except ConfigError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return 2
    except (EvaluationError, ServerError, CheckpointError, OSError) as error:
        print(f"evaluation failed: {redact(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = "; the same command goes on" if args.output else ""
        print(f"interrupted{again}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
