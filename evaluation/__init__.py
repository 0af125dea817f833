"""How good is a player: measured games with intervals, exact values, ratings between several players.

``measure`` games and exact values · ``intervals`` means and ratings with what they may be off by · ``players``
whoever can be named on a command line · ``arena`` everyone against everyone · ``english`` what training on games costs
elsewhere.
"""

from evaluation.measure import GameResult, evaluate, record, result_table

__all__ = ["GameResult", "evaluate", "record", "result_table"]
