"""What keeps a run alive around the algorithm in ``train_ppo.py``.

``options`` knobs and command line · ``preflight`` what a run would take, before it starts (``prompts`` tokens of random
games, ``memory``, ``sizes`` of what does not exist yet) · ``batch`` what a step is trained on · ``state`` what is
adaptive, in and out of checkpoints · ``process`` lock, signals, log lines · ``ranks`` several processes ·
``metrics``, ``console``, ``loggers`` what is written, shown, sent · ``about`` what a run is, for later · ``alarms``
signs that a run goes wrong.
"""
