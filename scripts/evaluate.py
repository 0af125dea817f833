"""Measure how good players are, with intervals. Players compared get the same deals, in both seats (not in a ladder).

    python scripts/evaluate.py --checkpoint runs/tiny-seed0                   against uniform random, 200 games a game
    python scripts/evaluate.py --checkpoint runs/tiny-seed0 --opponent mcts:50x1 --games tic_tac_toe hex#1 --exact
    python scripts/evaluate.py --compare runs/tiny-seed0 base                 is it better than without its adapter?
    python scripts/evaluate.py --ladder --checkpoint runs/tiny-seed0          ratings among base, bots and checkpoints
    python scripts/evaluate.py --checkpoint runs/tiny-seed0 --exploit 3       how much at least can be won from it?
    python scripts/evaluate.py --strength --checkpoint runs/tiny-seed0        against search, and against solved games
    python scripts/evaluate.py --model Qwen/Qwen3-4B --protocol affinetes     as the public environment scores
    python scripts/evaluate.py --model NAME --base-url http://127.0.0.1:8000/v1

A player is named by the directory of a checkpoint or of a run (its latest checkpoint), ``base``, a bot or the http(s)
address of an OpenAI-compatible server. Bots are random, mcts, mcts_light, mcts:SIMSxROLLOUTS, ismcts and
ismcts:SIMSxROLLOUTS, and in small games perfect (where nothing is hidden), cfr and cfr:ITERATIONS (near an equilibrium
where something is). A success is a score above 0.5.
"""

import argparse
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import config.start  # noqa: F401, before libraries load

import numpy as np

from config.flags import FlagParser, file_name, one_line
from config.reader import blaming, load_config, read_json
from curriculum import TaskRange
from envs import exact
from envs.config import is_address
from envs.openspiel import load_game, opposed, tables
from envs.opponents import CFR_ITERATIONS, make_bot, parse_opponent
from envs.ratings import rate
from envs.trace import check_config
from evaluation import measure
from evaluation.arena import Arena, check_match, exact_results, match_scores, must_take_tables
from evaluation.measure import OVERALL, GameResult, Row, game_sets, summary
from evaluation.players import (
    NO_ADDRESS,
    Contestant,
    Roster,
    find_adapter,
    is_bot,
    is_folder,
    is_of_a_run,
    is_path,
    player_flags,
    run_config_file,
)
from evaluation.tables import RARE, VALUE, between, columns, less_luck, shown_share
from games import own_digest
from training.config import DEFAULT_FILES, SECTIONS, narrowed
from training.console import Console
from training.metrics import finite
from training.process import ProgramError, at_least, device_errors, leave, run_program
from utils import CheckpointError, ConfigError, redact, write_file

log = logging.getLogger(__name__)
T = TypeVar("T")
LADDER_BOTS = ("random", "mcts:10x1", "mcts:50x1", "mcts:200x1")
NO_STAGES = "stages are not played here; --opponent names the player's"
STRENGTH = {
    "tic_tac_toe": ("mcts:100x1", "mcts:1000x1", "perfect"),
    "connect_four": ("mcts:10x1", "mcts:50x1", "mcts:100x1"),
    "kuhn_poker": ("cfr",),
    "leduc_poker": ("cfr",),
}


class Contest:
    """The evaluation that the command line asks for: its players, its opponent, its games, and how to run it."""

    def __init__(self, args: argparse.Namespace) -> None:
        affinetes = args.protocol == "affinetes"
        self.args, self.style = args, "github" if args.markdown else "plain"
        self.lost: list[str] = []  # why there is no result: a message for each that failed
        self.doubtful: list[str] = []  # why a result that is shown cannot be trusted
        self.roster = Roster(args.config, args.set, args.seed, args.greedy, args.model, affinetes)
        self.names = self._names()
        self.roster.check_model([*self.names, args.opponent or ""])
        self.opponent_name = (args.opponent or ("mcts" if affinetes else "random")).removeprefix("past:")
        self.roster.check([*self.names, self.opponent_name], self.names)  # before --games, which may be a run's own
        self.rows = self._rows()
        self.check([*self.names, self.opponent_name])  # models may take minutes to load
        self._check_ways()
        self.players = [self.roster.contestant(name, self.names) for name in self.names]
        self._check_kind()

    def _names(self) -> list[str]:
        args = self.args
        names = list(args.compare or args.ladder or args.checkpoint)
        if args.ladder is not None and not args.ladder:
            base = not args.base_url and (args.checkpoint or args.model)  # with --base-url, --model is the server's
            names = [*(["base"] if base else []), *LADDER_BOTS, *args.checkpoint]
        if args.base_url:
            names.append(args.base_url)
        elif args.model and not names:
            names = ["base"]
        return list(dict.fromkeys(names)) if args.ladder is not None else names

    def _rows(self) -> dict[str, list[TaskRange]]:
        """Row of the table -> its tasks, from --games or the run's curriculum; sets ``boards`` and ``served``."""
        folders = [name for name in self.names if is_folder(name)]
        config = self.roster.config(folders[0] if folders else None)
        curriculum = narrowed(config.curriculum, config.env)
        wanted = self.args.games or [item for stage in curriculum.stages for item in stage.games]
        if self.args.strength and not folders:
            wanted = self.args.games or list(STRENGTH)
        with blaming("--games: "):
            rows = game_sets(wanted)
        self.boards, self.served = config.env.env_type == "openspiel", config.env.env_mode != "local"
        if self.boards:
            return self._with_cells(rows) if self.args.strength else rows
        if self.args.ladder is not None or self.args.strength or self.args.exploit:
            raise ConfigError("env.env_type trace: programs have no opponents for --ladder, --strength or --exploit")
        if config.env.env_mode == "local":
            check_config(config.env, [first for [(first, _)] in rows.values()])
        return {f"trace {first}-{last}": [(first, last)] for [(first, last)] in rows.values()}

    def _check_kind(self) -> None:
        """Raise ConfigError where a player of games is asked to predict programs, or the other way round."""
        kind = "openspiel" if self.boards else "trace"
        for player in self.players:
            if player.env.env_type != kind:  # a bot's is the default, openspiel
                raise ConfigError(f"{player.label}: does not play the games of env.env_type {kind}")
        if self.served and all(player.player is None for player in self.players):
            raise ConfigError(f"env.env_mode: {self.players[0].label}: bots play here, only models on servers")
        for flag in ("opponent", "exact") if not self.boards else ():
            if getattr(self.args, flag):
                raise ConfigError(f"--{flag}: programs (env.env_type trace) have none")

    def _check_ways(self) -> None:
        """Raise ConfigError where ``--ladder`` or ``--exploit`` cannot be done with these players and games."""
        args, fits = self.args, exact.is_duel  # in other games a player may win from its equal
        if args.ladder is not None:
            fits = opposed  # of others, who is named first would be rated
            if len(self.names) < 2:
                raise ConfigError(f"--ladder: nobody to play against {self.names[0]}; name others, or --checkpoint")
        for game, [(first, _), *_] in self.rows.items() if args.exploit or args.ladder is not None else ():
            if not fits(load_game(first)):
                flag = "--exploit" if args.exploit else "--ladder"
                raise ConfigError(f"{flag}: {game} is not for two opposed players; choose other --games")

    def _with_cells(self, rows: dict[str, list[TaskRange]]) -> dict[str, list[TaskRange]]:
        """Those of ``rows`` that ``STRENGTH`` has, each with its first configuration alone."""
        firsts = {measure.label(parts[0][0]): parts[0][0] for parts in rows.values()}
        others = [game for game in firsts if game not in STRENGTH]
        if len(others) == len(firsts) or (others and self.args.games):
            raise ConfigError(f"--strength: nobody to measure {others[0]} by; --games can be {', '.join(STRENGTH)}")
        return {game: [(first, first)] for game, first in firsts.items() if game in STRENGTH}

    def settings(self, opponents: Sequence[Contestant]) -> dict[str, Any]:
        """All that determines the games, without secrets: the head of --output, which only they continue."""
        args = self.args
        return redact({
            "players": [p.origin | {"label": p.label, "env": vars(p.env)} for p in [*self.players, *opponents]],
            "games": self.rows, "num_episodes": args.episodes,
            **({"exploit": args.exploit, "exploit_steps": args.exploit_steps, "exact": args.exact,
                "config": [read_json(file) for file in args.config]} if args.exploit else {}),
            "own_games": own_digest(), "seed": args.seed, "greedy": args.greedy, "protocol": args.protocol,
            "set": args.set, "games_at_once": args.games_at_once}, words=False)  # fmt: skip

    @contextmanager
    def arena(self, opponents: Sequence[Contestant], matches: int) -> Iterator[Arena]:
        """An arena for ``matches`` matches, each of ``--episodes`` games, with its progress line."""
        with closing(Console(matches * self.args.episodes, stream=sys.stderr)) as console:
            yield Arena(self.args.output, self.settings(opponents), console, self.args.games_at_once)

    def check(self, names: Sequence[str], games: Sequence[str] = ()) -> None:
        """Raise ConfigError where a bot cannot play one of ``games`` (default: all); solving bots solve them here."""
        ranges = (part for game in games or self.rows for part in self.rows[game])
        shared = tables(ranges) if self.boards else []
        with blaming():
            for bot, known in product(filter(is_bot, names), shared):
                make_bot(known.game, known.spiel, parse_opponent(bot), 0, 0)

    def play(
        self, arena: Arena, own: Contestant, opponent: Contestant, games: Sequence[str] = (), deals: int = 1
    ) -> Iterator[tuple[str, list[Row]]]:
        """Play ``games`` (default: all); a game and its rows. Set 0 of ``deals`` is the one runs choose checkpoints by.

        The error of a game comes after what was played before it.
        """
        ranges = {game: self.rows[game] for game in games or self.rows}
        tasks = measure.paired_tasks([*ranges.values()], self.args.episodes, self.args.seed, opponent.opponent, deals)
        for game, drawn in zip(ranges, tasks, strict=True):
            rows = arena.play(own, opponent, game, drawn)
            failed = sum(row["outcome"] == "failed" for row in rows)
            if measure.too_many_failed(failed, len(rows)) and failed < len(rows):  # of none, nothing is shown
                self.doubtful.append(f"{failed} of {len(rows)} games of {game} failed: too many to trust the rest")
            yield game, rows

    def _complete(self, games: Iterator[tuple[str, list[Row]]]) -> dict[str, list[Row]]:
        """Game -> rows of those that ``play`` plays until one fails, which leaves a message in ``lost``."""
        played: dict[str, list[Row]] = {}
        self._found(partial(played.update, games))  # takes them one by one
        return played

    def _found(self, result: Callable[[], T]) -> list[T]:
        """[result()], or [] and a message in ``lost`` where that failed: the other results are shown all the same."""
        try:
            return [result()]
        except (ProgramError, CheckpointError, *device_errors()) as error:
            self.lost.append(one_line(error))
            return []

    def run(self) -> dict[str, Any]:
        """Evaluate every player against the opponent; compare the two of ``--compare``."""
        opponent = self.roster.contestant(self.opponent_name, self.names)
        for player in self.players:
            check_match(player, opponent)
        with self.arena([opponent], len(self.players) * len(self.rows)) as arena:
            played = list[dict[str, list[Row]]]()
            for player in self.players:
                played.append(self._complete(self.play(arena, player, opponent)))
                if len(played[-1]) < len(self.rows):
                    break  # games to be kept come in one order: nobody is skipped
        if not any(played):
            raise ProgramError(self.lost.pop(0))
        report: dict[str, Any] = {"settings": self.settings([opponent]), "tables": []}
        for player, rows in zip(self.players, played, strict=False):
            if not (table := self._results(player, rows, opponent)):
                continue
            shown = [r.row for r in table]
            report["tables"].append({"player": player.label, "opponent": opponent.label, "results": shown})
            exactly = "; exact, ceiling and share: against random" * (self.args.exact and opponent.label != "random")
            how = f"{'greedy' if self.args.greedy and player.player else 'sampled'}, seed {self.args.seed}{exactly}"
            print(f"{player.label}{f' against {opponent.label}' * self.boards}, {how}")  # bots are not greedy
            lines = [
                {"game": r.game, "games": r.episodes, "value": r.value, "95 %": between(r.low, r.high),
                 "success": r.success, **{kind: getattr(r, kind) for kind in RARE}, "legal": r.legal_mass,
                 "less luck": less_luck(r.adjusted, r.adjusted_interval, r.exact), "exact": r.exact,
                 "ceiling": r.ceiling,
                 "share": shown_share(r.share, r.share_interval),
                 "NashConv": r.nash_conv} for r in table
            ]  # fmt: skip
            print(columns(lines, self.style, value=VALUE, legal=".3g", exact=VALUE, ceiling=VALUE), end="\n\n")
        compare = partial(measure.differences, played[0], played[-1], measure.apart(self.rows))
        if self.args.compare and len(played) > 1 and played[1] and (found := self._found(compare)):
            [report["comparison"]] = found
            print(f"{self.players[0].label} minus {self.players[1].label}, value on the same deals")
            lines = [{"game": d["game"], "pairs": d["pairs"], "difference": d["difference"],
                      "95 %": between(*d["interval"]), "p": d["p"],
                      "less luck": less_luck(d["adjusted"], d["adjusted_interval"])} for d in found[0]]  # fmt: skip
            print(columns(lines, self.style, difference=VALUE, p=".2g"), end="\n\n")
        return report

    def _results(self, player: Contestant, rows: dict[str, list[Row]], opponent: Contestant) -> list[GameResult]:
        results = list[GameResult]()
        for game, played in rows.items():
            known = self._exact(player, played)
            if not known and self.boards and opponent.label == "random":
                known = measure.ceilings({row["task_id"] for row in played})
            results += self._found(partial(summary, game, [played], **known))
        averaged = measure.apart(self.rows)
        whole = len(results) == len(self.rows) and len(averaged) > 1  # else its mean would be compared with others
        return [*results, summary(OVERALL, [rows[game] for game in averaged])] if whole else results

    def ladder(self) -> dict[str, Any]:
        """Play every pair of players and rate them, over all games and in each."""
        players = self.players
        pairs = [sorted(pair, key=lambda i: players[i].standing) for pair in combinations(range(len(players)), 2)]
        for a, b in pairs:
            check_match(players[a], players[b])
        results: dict[str, dict[tuple[int, int], np.ndarray]] = {game: {} for game in self.rows}
        with self.arena([], len(pairs) * len(self.rows)) as arena:
            for deals, (a, b) in enumerate(pairs, 1):  # the same deals in all would correlate the matches' luck
                played = self._complete(self.play(arena, players[a], players[b], deals=deals))
                if len(played) < len(self.rows):
                    pairs = pairs[: deals - 1]  # those played are rated
                    break
                for game, rows in played.items():
                    for units in self._found(partial(match_scores, rows)):
                        results[game][a, b] = units
        results = {game: matches for game, matches in results.items() if len(matches) == len(pairs)}
        if not pairs or not results:
            raise ProgramError(self.lost.pop(0))
        return self._ladder_report(results)

    def exploit(self) -> dict[str, Any]:
        """Train best responses to each player in each game and play the best: lower bounds of how much it can lose."""
        for player in self.players:
            check_match(player, player)  # as it and its responses will
        report: dict[str, Any] = {"settings": self.settings([]), "tables": []}
        with tempfile.TemporaryDirectory() as held, self.arena([], len(self.players) * len(self.rows)) as arena:
            for i, player in enumerate(self.players):
                config, own = run_config_file(Path(str(player.folder))), Path(held, str(i))
                shutil.copytree(str(player.folder), own, symlinks=True)  # its run may go on
                if not (own / config.name).exists():  # it lay above
                    shutil.copy(config, own)
                player.folder = str(own)
                attempts = [partial(self._exploited, arena, player, game) for game in self.rows]
                if not (results := [r for attempt in attempts for r in self._found(attempt)]):
                    continue
                arena.console.close()
                report["tables"].append({"player": "best response", "opponent": player.label, "results": results})
                exactly = "exact: the best there is; " * self.args.exact
                print(f"best of {self.args.exploit} responses to {player.label}, {self.args.exploit_steps} steps each; "
                      f"{exactly}trained: score of each in its last steps")  # fmt: skip
                lines = [{"game": r["game"], "games": r["episodes"], "won from it": r["value"],
                          "95 %": between(r["low"], r["high"]),
                          "less luck": less_luck(r["adjusted"], r["adjusted_interval"]), "exact": r["exploitability"],
                          "trained": " ".join(f"{score:.3f}" for score in r["trained"])} for r in results]  # fmt: skip
                print(columns(lines, self.style, **{"won from it": VALUE}, exact=VALUE), end="\n\n")
        return report

    def _exploited(self, arena: Arena, player: Contestant, game: str) -> dict[str, Any]:
        """The result of the best response in one game, with the training score of every response."""
        from scripts.exploit.train import best_response, how_to_respond, known

        changed = how_to_respond(self.roster.config(player.folder).ppo)
        config, ranges = self.roster.config(player.folder, [changed]), self.rows[game]
        frozen = find_adapter(str(player.folder))
        exactly = known(player, ranges, arena.console.progress) if self.args.exact else nullcontext()
        with exactly:
            with tempfile.TemporaryDirectory() as folder:
                best, scores = best_response(config, frozen, ranges, self.args, Path(folder), arena.console)
                answer = self.roster.contestant(str(best), self.names)
            # Named by its weights: --output may hold games of one that another machine has trained differently.
            answer = replace(answer, label=f"response_to_{player.label}@{answer.origin['adapter'][:8]}")
            answer.player.greedy = True  # a best response need not vary
            [(_, rows)] = self.play(arena, answer, player, [game])
        gain = self._exact(player, rows).get("nash_conv")  # summed over both seats, in the game's own units
        most = None if gain is None else measure.mean_value(load_game(rows[0]["task_id"]), (gain, 0.0))
        return summary(game, [rows]).row | {"trained": scores, "exploitability": most}

    def _exact(self, player: Contestant, rows: Sequence[Row]) -> dict[str, float]:
        """``exact_results`` of the games played, where --exact asks for them and no game was truncated."""
        if self.args.exact and any(row["outcome"] == "truncated" for row in rows):
            log.warning("--exact: left out for %s, whose prompts do not always fit", player.label)
            return {}
        found = partial(exact_results, player, {row["task_id"] for row in rows})
        return (self._found(found) or [{}])[0] if self.args.exact else {}

    def _ladder_report(self, results: dict[str, dict[tuple[int, int], np.ndarray]]) -> dict[str, Any]:
        labels = [player.label for player in self.players]
        apart = measure.apart({game: self.rows[game] for game in results})
        pairs = {pair: [results[game][pair] for game in apart] for pair in next(iter(results.values()))}
        met = sorted({i for pair in pairs for i in pair})
        anchor = next((i for i in met if labels[i] == "random"), met[0])
        ratings = {OVERALL: rate(pairs, len(labels), anchor)}
        for game, matches in results.items():
            ratings[game] = rate({pair: [units] for pair, units in matches.items()}, len(labels), anchor)
        order = sorted(met, key=lambda i: -ratings[OVERALL][i].points)
        lines = [{"player": labels[i], **{game: f"{r[i].points:+.0f} [{r[i].low:+.0f}, {r[i].high:+.0f}]"
                                          for game, r in ratings.items()}} for i in order]  # fmt: skip
        print(f"Ratings (400 points: scores as 10 to 1), 95 % intervals, {self.args.episodes} games a pair and game")
        print(columns(lines, self.style), end="\n\n")
        played = [{"player": labels[i], "opponent": labels[j], "game": game, "games": int(r.size),
                   "points": float(r.mean())} for game, m in results.items() for (i, j), r in m.items()]  # fmt: skip
        rated = [{"player": labels[i], "ratings": {g: r[i]._asdict() for g, r in ratings.items()}} for i in order]
        return {"settings": self.settings([]), "ladder": rated, "matches": played}

    def strength(self) -> dict[str, Any]:
        """Play each game against its opponents in ``STRENGTH``, on the same deals for every player."""
        cells = [(game, self.roster.contestant(name)) for game in self.rows for name in STRENGTH[game]]
        for game, opponent in cells:
            for player in self.players:
                check_match(player, opponent)
            self.check([opponent.label], [game])
        opponents, results = {opponent.label: opponent for _, opponent in cells}, []
        with self.arena([*opponents.values()], len(self.players) * len(cells)) as arena:
            for player, (game, opponent) in product(self.players, cells):
                if not (played := self._complete(self.play(arena, player, opponent, [game]))):
                    break  # as in ``run``
                results += [(player, opponent, r) for r in self._found(partial(summary, game, [played[game]]))]
        if not results:
            raise ProgramError(self.lost.pop(0))
        print(f"Strength, {'greedy' if self.args.greedy else 'sampled'}, seed {self.args.seed}")
        several = len({p.label for p, _, _ in results}) > 1
        lines = [
            {"player": p.label if several else None, "game": r.game, "opponent": o.label, "games": r.episodes,
             "value": r.value, "95 %": between(r.low, r.high), "won": r.success, "drawn": r.draw, "lost": r.loss,
             "truncated": r.truncated, "forfeited": r.forfeited, "failed": r.failed} for p, o, r in results
        ]  # fmt: skip
        print(columns(lines, self.style, value=VALUE), end="\n\n")
        shown = [{"player": p.label, "opponent": o.label, **r.row} for p, o, r in results]
        told = {g: exact_results(cfr, {self.rows[g][0][0]})["nash_conv"] for g, cfr in cells if cfr.label == "cfr"}
        if told:
            print(f"cfr: {CFR_ITERATIONS} iterations; its NashConv: {', '.join(f'{told[g]:.4f} in {g}' for g in told)}")
        return {"settings": self.settings([*opponents.values()]), "strength": shown, "cfr_nash_conv": told}


def _one_sets(names: str, items: Sequence[str]) -> bool:
    """Whether one of the ``--set`` items gives a knob of these names, directly or within an object."""
    return any(re.match(rf'\s*([^=]*\.)?({names})\s*=|[^=]*=.*"({names})"', item) for item in items)


def _check_how(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    plain = [item.lower().replace("-", "_") for item in args.set]
    if _one_sets("opponent|opponent_type", plain):
        parser.error(f"--set env.opponent: {NO_STAGES}")
    for file in args.config:
        with blaming("", ConfigError, parser.error):
            env = load_config(SECTIONS, [*DEFAULT_FILES, file], skip_unknown_sections=True)["env"]
            own = not is_of_a_run(file)
        if own and env.opponent:
            parser.error(f"--config {file}: env.opponent: {NO_STAGES}")
    if args.exploit_steps and not args.exploit:
        parser.error(f"--exploit-steps {args.exploit_steps}: nothing is trained without --exploit N")
    if args.exploit and _one_sets("num_train_steps|sweep", plain):
        parser.error("--set ppo.num_train_steps, ppo.sweep: a response is trained by --exploit-steps steps of games")
    if args.opponent == "past:":
        parser.error("--opponent past: names nobody; past:RUN plays a checkpoint")
    if args.exploit and args.greedy:
        parser.error("--exploit: responses learn against sampled play, and are measured against it; leave out --greedy")
    if args.base_url and not is_address(args.base_url):  # it would be taken for a player's name
        parser.error(f"--base-url: {NO_ADDRESS}")


def _check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for flag, given in (("--json", args.json), ("--output", args.output)):
        if given and not Path(os.path.realpath(given)).parent.is_dir():
            parser.error(f"{flag} {given}: there is no such folder")
    if args.json:
        with blaming(f"--json {args.json}: ", (ConfigError, OSError), parser.error):
            must_take_tables(Path(os.path.realpath(args.json)), args.output)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", nargs="+", default=[], metavar="PLAYER", help="whom to evaluate")
    how = parser.add_mutually_exclusive_group().add_argument  # one of them would silently win
    how("--compare", nargs="+", action="extend", metavar="PLAYER", help="evaluate two and test the difference")
    how("--ladder", nargs="*", action="extend", metavar="PLAYER",
        help=f"round robin; default: --checkpoint, with one also base, and {', '.join(LADDER_BOTS)}")  # fmt: skip
    how("--exploit", type=at_least(1, 1000), metavar="N", help="train N best responses, play the best: a lower bound")
    how("--strength", action="store_true", help="a table against search and solved games, 1000 games a cell")
    add("--exploit-steps", type=at_least(1, 2**20), help="of PPO for each best response (default 200)")
    add("--base-url", metavar="URL", help="of an OpenAI-compatible server; its key comes from OPENAI_API_KEY")
    add("--opponent", metavar="PLAYER", help="default random; mcts with --protocol affinetes")
    add("--games", nargs="+", metavar="GAME", help="NAME, NAME#CONFIG, task id or FIRST-LAST; default: the run's")
    add("--episodes", type=at_least(2, 2**20), help="a game, half in each seat (default 200, with --strength 1000)")
    add("--exact", action="store_true", help="exact values, NashConv: of small games and one configuration")
    add("--protocol", choices=("native", "affinetes"), default="native", help="affinetes: as the public environment")
    add("--output", type=file_name, metavar="FILE.jsonl", help="a row a game; the command goes on where it was "
        "interrupted (--exploit trains its responses again)")  # fmt: skip
    add("--json", type=file_name, metavar="FILE", help="the tables as JSON")
    add("--markdown", action="store_true", help="tables for pasting into Markdown")
    add("--games-at-once", type=at_least(1), default=128, help="at most; --output loses no more (default 128)")
    player_flags(parser)
    args = parser.parse_args(argv)
    args.episodes = args.episodes or (1000 if args.strength else 200)
    if args.strength and (args.opponent or args.exact):
        parser.error("--strength names opponents itself: leave out --opponent and --exact")
    if not (args.checkpoint or args.compare or args.ladder is not None or args.model):
        parser.error("nobody to evaluate: name a --checkpoint or a --model, or use --compare or --ladder")
    if args.compare and len(args.compare) != 2:
        parser.error(f"--compare: expected two players, in one --compare, not {len(args.compare)}")
    if args.episodes % 2:
        parser.error(f"--episodes {args.episodes}: an even number, half of them for each seat")
    if args.exploit and (args.base_url or not (args.checkpoint and all(map(is_path, args.checkpoint)))):
        parser.error("--exploit: needs --checkpoint with runs or their checkpoints, and nobody else")
    if (args.compare and (args.checkpoint or args.base_url)) or (args.ladder and args.checkpoint):
        parser.error("--compare and --ladder PLAYER... name all players: leave out --checkpoint, and --base-url")
    if (args.ladder is not None and (args.opponent or args.exact)) or (args.exploit and args.opponent):
        parser.error("--ladder and --exploit name opponents themselves: leave out --opponent, and of --ladder --exact")
    _check_how(parser, args)
    args.exploit_steps = args.exploit_steps or 200
    _check_files(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; exit codes: 0 done, 1 results are missing, 2 bad usage, 130 interrupted."""
    args = arguments(argv)

    def run() -> None:
        contest = Contest(args)
        if args.exploit or args.strength:
            report = contest.exploit() if args.exploit else contest.strength()
        else:
            report = contest.run() if args.ladder is None else contest.ladder()
        if args.json:
            report["missing"] = redact(contest.lost)
            write_file(args.json.resolve(), (json.dumps(finite(report), indent=1) + "\n").encode())
        if wrong := [*contest.lost, *contest.doubtful]:
            raise ProgramError("; ".join(wrong))

    return run_program(run)


if __name__ == "__main__":
    leave(main())
