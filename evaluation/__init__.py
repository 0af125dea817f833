"""How good is a player: sampled games with confidence intervals, and exact values where a game is small enough.

``measure`` games and exact values · ``intervals`` confidence intervals and paired differences · ``tables`` results as
text · ``players`` whoever can be named on a command line · ``arena`` contestants against opponents, with a file of
results, and their exact values · ``english`` what training on games does to other uses of the model.
"""

from evaluation.measure import GameResult, evaluate, record, result_table

__all__ = ["GameResult", "evaluate", "record", "result_table"]
