"""What other libraries call our keys: TRL, Stable-Baselines3, CleanRL, verl, PEFT and transformers."""

_SYNONYMS = {
    "learning_rate": "lr actor_lr step_size",
    "lr_final": "final_lr_fraction",
    "num_train_steps": "steps max_steps num_steps train_steps total_steps total_training_steps num_updates iterations",
    "batch_size": "train_batch_size rollout_batch_size games_per_step",
    "mini_batch_size": "minibatch_size ppo_mini_batch_size per_device_train_batch_size micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum accumulation accumulation_steps",
    "ppo_epochs": "epochs n_epochs num_epochs num_ppo_epochs update_epochs noptepochs",
    "cliprange": "clip clip_range clip_eps clip_epsilon clip_ratio clip_coef",
    "vf_coef": "value_coef value_loss_coef vf_coefficient critic_coef",
    "entropy_coef": "ent_coef entropy_coeff entropy_bonus entropy_beta entropy_loss_coef",
    "gamma": "discount discount_factor",
    "lam": "lambda gae_lambda lmbda",
    "init_kl_coef": "kl_coef kl_coeff kl_penalty kl_beta beta",
    "max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clipping",
    "max_seq_length": "max_length max_seq_len max_sequence_length max_model_len max_len context_length",
    "max_new_tokens": "max_tokens max_response_length response_length max_completion_length",
    "save_freq": "save_steps save_every save_interval checkpoint_every",
    "eval_freq": "eval_steps eval_every eval_interval",
    "model_name": "model_name_or_path model_path base_model pretrained_model",
    "use_4bit": "load_in_4bit use_4_bit",
    "dtype": "torch_dtype precision",
    "r": "lora_r rank lora_rank",
    "lora_alpha": "alpha",
    "allowed_game_indices": "game games allowed_games game_indices",
    "games_path": "openspiel_agents_path",
    "opponent": "opponent_type",
    "env_mode": "mode",
    "env_image": "image docker_image",
    "failure_replay_prob": "failure_replay replay_prob",
    "output_dir": "out output save_dir checkpoint_dir run_dir",
    "logger": "wandb_mode report_to log_with wandb loggers",
    "keep_last": "save_total_limit",
    "seed": "random_seed",
    "threads": "num_threads",
    "threshold": "progression_threshold success_threshold",
    "min_episodes": "min_games",
}
KEYS = {other: key for key, others in _SYNONYMS.items() for other in others.split()}
SECTIONS = {"train": "ppo", "training": "ppo", "trainer": "ppo", "environment": "env", "peft": "lora"}

_STAGES = "a stage has it: curriculum.stages, a list of objects"
_GAMES = "a run plays ppo.num_train_steps * ppo.batch_size games"
# Keys of older runs that no longer exist: the values that are ignored (None: all), and the reason given.
GONE: dict[str, tuple[tuple[object, ...] | None, str]] = {
    "run.keep_best": ((True, False), "the best is always kept"), "lora.lora_dropout": ((0.0,), "there is none"),
    "lora.first_layer": (None, "fresh adapters are in all layers; ppo.context_grad false saves more"),
    "ppo.lr_target_kl": ((None,), "it was off"), "ppo.critic_warmup_steps": ((0,), "it was off"),
    "curriculum.past_every": (None, "it is a twentieth of the run, 100 steps at most"),
}  # fmt: skip
# Hints for well-known keys that have no counterpart.
HINTS = dict.fromkeys(("progression_threshold", "success_threshold", "threshold", "min_episodes", "min_games"), _STAGES)
HINTS |= dict.fromkeys(("total_timesteps", "total_episodes", "num_episodes", "num_games"), _GAMES)
_DROPOUT = "there is no dropout: with it the ratio is not 1 before the first update"
HINTS |= dict.fromkeys(("dropout", "lora_dropout"), _DROPOUT)
HINTS |= dict.fromkeys(("fp16", "bf16"), "model.dtype says so: float16 or bfloat16")
_SHARE = "ppo.lr_final is a share of ppo.learning_rate, not a rate"
HINTS |= dict.fromkeys(("lr_end", "end_lr", "final_lr", "lr_min", "min_lr"), _SHARE)
HINTS |= dict.fromkeys(("warmup_steps", "warmup_ratio"), "there is no warm-up: it taught nothing (docs/log.md)")
HINTS |= dict.fromkeys(("lr_scheduler_type", "lr_schedule", "scheduler"), "ppo.lr_final sets the linear decay")
