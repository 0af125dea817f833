"""Deliberate faults in the training code, each with the test that has to notice it.

    python tests/tools/mutants.py            # all of them, a table; exit 1 where one survives or no longer applies
    python tests/tools/mutants.py gae clip   # those whose description contains one of the words

Each is applied to a copy of the tree, in which only the named test runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TRAIN, POLICY, ADAPTERS, NETWORK, TREE, ATTENTION, LORA, LAYERS = (
    "train_ppo.py",
    "policy/player.py",
    "policy/adapters.py",
    "policy/network.py",
    "policy/tree.py",
    "policy/attention.py",
    "policy/lora.py",
    "policy/layers.py",
)
STEP, STATE, PROCESS, LOGGERS = (f"training/{name}.py" for name in ("trajectories", "state", "process", "loggers"))
PPO, BATCH = "tests/training/test_ppo.py::test_", "tests/training/test_ppo_batch.py::test_"
MODEL, UPDATE = "tests/policy/test_model.py::test_", "tests/training/test_ppo_update.py::test_"
POSITIONS, KNEW = "tests/training/test_positions.py::test_", "training/positions.py"
SWEEPS, SWEEP, EXACT = "tests/training/test_sweep.py::test_", "training/sweep.py", "envs/exact.py"
TURNS = "policy/conversations.py"
REHEARSE, REHEARSAL = "policy/rehearsal.py", "tests/policy/test_rehearsal.py::test_"
RUN, FAULTS = "tests/training/test_train.py::test_", "tests/faults/test_train_faults.py::test_"


class Mutant(NamedTuple):
    """``old`` occurs once in ``file``; with ``new`` in its place the test must fail."""

    fault: str
    file: str
    old: str
    new: str


MUTANTS = {
    # ---- advantages and rewards
    PPO + "gae_by_hand_when_the_game_ended_and_when_it_was_cut_off": [
        Mutant("GAE: gamma squared", TRAIN, "+ gamma * next_value_S", "+ gamma**2 * next_value_S"),
    ],
    PPO + "gae_is_the_papers_sum": [
        Mutant("GAE: lambda dropped", TRAIN, "gamma * lam * next", "gamma * next"),
        Mutant("GAE: padding counts as decisions", TRAIN,
               "next_value_S = torch.where(real_S, values_ST[:, t], next_value_S)", "next_value_S = values_ST[:, t]"),
    ],
    PPO + "gae_at_the_ends_of_gamma_and_lambda": [
        Mutant("GAE: returns are the advantages", TRAIN,
               "torch.where(mask_ST, advantages_ST + values_ST, 0.0)", "torch.where(mask_ST, advantages_ST, 0.0)"),
    ],
    SWEEPS + "targets_are_a_step_of_mirror_descent": [
        Mutant("sweep: the entropy bonus is a penalty", SWEEP,
               "worth_M - ppo.entropy_coef *", "worth_M + ppo.entropy_coef *"),
        Mutant("sweep: targets are no probabilities", SWEEP, "part.log_softmax(0) for part", "part for part"),
        Mutant("sweep: worth in the game's units", SWEEP, "- low - high) / (high - low)", "- low - high) / 2"),
    ],
    SWEEPS + "the_magnet_pulls_to_the_moving_average": [
        Mutant("sweep: the magnet pushes", SWEEP, "- ppo.magnet_coef * pull_M", "+ ppo.magnet_coef * pull_M"),
    ],
    SWEEPS + "the_update_moves_log_probabilities_to_their_targets": [
        Mutant("sweep: half of each error", TRAIN, "(new.logprobs - batch.targets_M[at_M])",
               "(new.logprobs / 2 - batch.targets_M[at_M])"),
    ],
    SWEEPS + "the_bonus_is_in_the_targets_and_counts_once": [
        Mutant("sweep: the bonus counts twice", TRAIN, "if batch.targets_M is None else 0.0", "if True else 0.0"),
    ],
    "tests/envs/test_exact.py::test_what_answers_are_worth_is_what_openspiel_says_of_what_follows": [
        Mutant("exact: own moves in the odds of the others", EXACT,
               "np.where(own, 1.0, odds_N[level])", "odds_N[level]"),
        Mutant("exact: seat 1 is paid as seat 0", EXACT, "np.where(seat_E == 0, 1.0, -1.0)", "np.ones(len(seat_E))"),
        Mutant("exact: not a mean", EXACT, "total / count if count else 0.0", "total"),
    ],
    PPO + "whitening_is_the_standard_score_of_the_population": [
        Mutant("whitening: not centred", TRAIN, "(x_M - x_M.mean()) /", "x_M /"),
    ],
    PPO + "groups_are_whitened_alone_and_the_others_by_all": [
        Mutant("luck: what is left in a game is scaled up", TRAIN,
               "group], None, noisy_M[groups_M == group])", "group])"),
    ],
    BATCH + "advantages_are_whitened_per_game_without_what_is_not_trained": [
        Mutant("whitening: over all games", TRAIN,
               "whiten(advantages_M[trained_M], group_M[trained_M],", "whiten(advantages_M[trained_M], None,"),
        Mutant("whitening: none", TRAIN,
               "= whiten(advantages_M[trained_M],", "= (lambda x_M, *_: x_M)(advantages_M[trained_M],"),
    ],
    BATCH + "an_end_is_final_but_a_cut_off_game_is_worth_what_was_expected": [
        Mutant("bootstrap through termination", TRAIN,
               "torch.where(cut_S, values_M[last_S], 0.0)", "values_M[last_S]"),
        Mutant("no bootstrap after truncation", TRAIN,
               "torch.where(cut_S, values_M[last_S], 0.0)", "torch.zeros(len(rows))"),
        Mutant("the decision that was cut off is trained", TRAIN, "last_S[cut_S], False)", "last_S[cut_S], True)"),
    ],
    BATCH + "in_self_play_each_seat_is_paid_its_own_score": [
        Mutant("another seat's reward", STEP, ".get(self.seat, self.episode.score)",
               ".get(min(self.episode.sequences), self.episode.score)"),
    ],
    BATCH + "a_score_is_mapped_to_minus_one_to_one_and_paid_after_the_last_decision": [
        Mutant("reward after the first decision", STEP,
               "[0.0] * (decisions - 1) + [0.0 if row.cut else next(scores)]",
               "[0.0 if row.cut else next(scores)] + [0.0] * (decisions - 1)"),
    ],
    BATCH + "in_a_batch_the_moments_are_kept_apart_by_seat_and_the_reported_reward_is_the_games": [
        Mutant("rewards of both seats mixed", STEP,
               'return f"{self.episode.game}/{self.seat}"', 'return f"{self.episode.game}"'),
    ],
    BATCH + "an_opponents_lucky_moves_are_taken_off_where_they_happen_and_a_positions_worth_is_the_baseline": [
        Mutant("luck: rewarded", TRAIN, "rewards_M - luck_M", "rewards_M + luck_M"),
        Mutant("luck: what is left is scaled up", TRAIN, ", lucky_M[trained_M])", ")"),
        Mutant("luck: the critic stays the baseline", TRAIN,
               "torch.where(worth_M.isnan(), advantages_M, returns_M - worth_M)", "advantages_M"),
    ],
    BATCH + "luck_between_two_decisions_is_taken_off_after_the_first_and_discounted_as_it_is": [
        Mutant("luck: that of later decisions twice", STEP, "sum(found[0][start:end])", "sum(found[0][start:])"),
    ],
    BATCH + "what_is_known_is_standardised_as_the_rewards_are": [
        Mutant("luck: not standardised", STEP, "[x / scale for x in luck]", "[*luck]"),
        Mutant("luck: another scale of baselines", STEP, "[(x - mean) / scale for x", "[x - mean for x"),
    ],
    SWEEPS + "minibatches_hold_their_share_of_whole_positions": [
        Mutant("sweep: all positions in one unit", SWEEP, "n % ppo.batch_size for", "0 * n for"),
    ],
    "tests/envs/test_exact.py::test_luck_against_a_known_player_is_that_of_its_own_moves": [
        Mutant("luck: a known player plays at random", EXACT,
               "opponent.table if opponent else table for", "table for"),
    ],
    "tests/envs/test_exact.py::test_answers_are_worth_as_much_beside_each_other_less_luck": [
        Mutant("luck: one's own moves", "envs/exact.py", "[] if state.current_player() == seat else legal", "legal"),
    ],
    BATCH + "the_kl_penalty_is_paid_decision_by_decision": [
        Mutant("KL penalty: rewarded", TRAIN, "rewards_M -= kl_coef * kl_M", "rewards_M += kl_coef * kl_M"),
    ],
    PPO + "adaptive_kl_by_hand": [
        Mutant("KL penalty: adapted backwards", STEP, "kl / ppo.target - 1", "1 - kl / ppo.target"),
    ],
    UPDATE + "the_kl_is_taken_to_the_model_without_its_adapter": [
        Mutant("KL penalty: to the policy itself", ADAPTERS,
               'adapter == "base", [adapter]', 'False, ["default"]'),
    ],
    # ---- loss
    PPO + "loss_and_its_parts_are_the_papers": [
        Mutant("policy loss: sign", TRAIN, "policy_M = torch.maximum", "policy_M = -torch.maximum"),
        Mutant("policy loss: ratio to itself", TRAIN,
               "log_ratio_M = logprobs_M - old_logprobs_M", "log_ratio_M = logprobs_M - logprobs_M.detach()"),
    ],
    PPO + "clipping_by_hand": [
        Mutant("policy loss: optimistic", TRAIN, "policy_M = torch.maximum", "policy_M = torch.minimum"),
        Mutant("policy loss: clip bounds swapped", TRAIN,
               "clamp(1 - clip, 1 + clip)", "clamp(1 + clip, 1 - clip)"),
    ],
    PPO + "value_clipping_by_hand": [
        Mutant("value loss: optimistic", TRAIN, "0.5 * torch.maximum", "0.5 * torch.minimum"),
        Mutant("value loss: clipped around the return", TRAIN, "near_M = old_values_M +", "near_M = returns_M +"),
    ],
    PPO + "without_a_clip_range_logits_follow_the_advantage_however_rare_the_answer": [
        Mutant("NeuRD: any answer however rare", TRAIN, ".clamp(max=NEURD_CAP)", ""),
        Mutant("NeuRD: answers driven apart", TRAIN, "bonus_M = -spread_M", "bonus_M = spread_M"),
    ],
    UPDATE + "without_a_clip_range_an_update_follows_preferences": [
        Mutant("NeuRD: the mean over every game's answers", POLICY,
               " / mask_NV.sum(-1, keepdim=True)", " / mask_NV.shape[1]"),
    ],
    PPO + "entropy_is_rewarded_and_a_weight_of_zero_silences_a_decision": [
        Mutant("entropy punished", TRAIN, "- ppo.entropy_coef", "+ ppo.entropy_coef"),
        Mutant("weights missing", TRAIN, "loss = (weights_M * (", "loss = (1.0 * ("),
    ],
    PPO + "k3_estimates_the_kl_without_bias_and_is_never_negative": [
        Mutant("KL estimated by k1", TRAIN, "ratio_M - 1 - log_ratio_M", "-log_ratio_M"),
    ],
    UPDATE + "legal_mass_is_rewarded": [
        Mutant("legal mass punished", TRAIN, "loss - ppo.legal_mass_coef", "loss + ppo.legal_mass_coef"),
    ],
    # ---- update
    UPDATE + "the_gradient_is_that_of_the_whole_step_however_it_is_cut": [
        Mutant("mean over each micro-batch", TRAIN, "loss / count.clamp(min=1e-8)", "loss / len(at_M)"),
        Mutant("only the last micro-batch counts", TRAIN, "        loss.backward()",
               "        policy.peft_model.zero_grad(), policy.value_head.zero_grad()\n"
               "        loss.backward()"),
        Mutant("advantages of other sequences", TRAIN, "batch.spans[members[j]] for j", "batch.spans[j] for j"),
        Mutant("decisions out of order", NETWORK, "np.argsort(decisions)", "np.arange(len(decisions))"),
        Mutant("shared beginning: positions start anew", TREE,
               "np.arange(own) + len(row.past) + shared", "np.arange(own) + len(row.past)"),
        Mutant("shared beginning: not attended to", TREE, "np.concatenate((flat[-1][:shared], mine))",
               "np.concatenate((mine[:1].repeat(shared), mine))"),
    ],
    UPDATE + "what_is_not_finite_changes_no_byte_and_is_counted": [
        Mutant("no check of the gradient", TRAIN,
               "loss + norm + get_total_norm([p.grad for p in reached.values()])", "loss"),
        Mutant("no check of what is not clipped", TRAIN, " + get_total_norm([p.grad for p in reached.values()])", ""),
        Mutant("no check of a norm that overflows", TRAIN, "loss + norm + get_total", "loss + get_total"),
        Mutant("no check at all", TRAIN,
               "torch.isfinite(loss + norm + get_total_norm([p.grad for p in reached.values()]))", "True"),
        Mutant("step before the check", TRAIN,
               "            sound = bool(",
               "            optimizer.step()\n            sound = bool("),
        Mutant("gradient kept after the step", TRAIN,
               "            optimizer.zero_grad(set_to_none=True)\n            if stats", "            if stats"),
    ],
    UPDATE + "running_out_of_memory_halves_the_batch_and_changes_nothing_else": [
        Mutant("gradient kept when memory runs out", "training/memory.py",
               "            optimizer.zero_grad(set_to_none=True)\n            if not policy",
               "            if not policy"),
    ],
    UPDATE + "epochs_end_when_the_policy_has_moved_far_enough": [
        Mutant("KL never ends the epochs", TRAIN, "epoch_kl > (ppo.target_kl or math.inf)", "False"),
    ],
    UPDATE + "every_epoch_has_a_shuffle_of_its_own": [
        Mutant("every epoch in the same order", TRAIN, "(*key, epoch)", "key"),
    ],
    BATCH + "old_log_probabilities_are_the_rollouts_or_the_learners": [
        Mutant("old log-probabilities never recomputed", STEP, "if not ppo.recompute_logprobs and not served:",
               "if not served:"),
    ],
    # ---- the policy
    UPDATE + "the_first_ratio_is_one": [
        Mutant("mean over a decision's tokens", POLICY, "for x_N in of_choices)",
               "for x_N in (of_choices[0] / counts.to(owner_N)[owner_N], *of_choices[1:]))"),
        Mutant("choices read one token late", POLICY,
               "(d.start - 1, *answer(d)) for", "(d.start - 1, *(p + 1 for p in answer(d))) for"),
        Mutant("temperature in the rollout only", POLICY,
               "self.lm_head.weight[columns_V].float().T / self.temperature",
               "self.lm_head.weight[columns_V].float().T"),
        Mutant("constraint in the rollout only", POLICY,
               "F.log_softmax(logits_NV.masked_fill(~mask_NV, -torch.inf), dim=-1)\n        entropy_N",
               "F.log_softmax(logits_NV, dim=-1)\n        entropy_N"),
        Mutant("another decision's choice is scored", POLICY,
               "torch.searchsorted(columns_V, chosen_N)", "torch.searchsorted(columns_V, chosen_N.flip(0))"),
        Mutant("equal rows read at the first one's position", NETWORK,
               "wanted = [tree.flat[index[row]][at] for", "wanted = [tree.flat[index[row]][at[:1] * len(at)] for"),
        Mutant("cached tokens at wrong positions", TREE,
               "np.arange(own) + len(row.past) + shared", "np.arange(own) + max(len(row.past) - 1, 0) + shared"),
    ],
    UPDATE + "rollout_values_are_those_that_the_update_reads": [
        Mutant("value read one token late", POLICY, "(d.start - 1, *answer(d)) for", "(d.start, *answer(d)) for"),
    ],
    UPDATE + "the_whole_losss_gradient_is_that_of_finite_differences": [
        Mutant("value loss without gradient", POLICY, "value_rows.to(self.device)].float()",
               "value_rows.to(self.device)].detach().float()"),
        Mutant("rehearsal rewards drifting", TRAIN, "(ppo.rehearsal_coef * kl).backward()",
               "(-ppo.rehearsal_coef * kl).backward()"),
    ],
    UPDATE + "states_count_as_decisions_do_and_are_told_so": [
        Mutant("states: all decisions alike", TRAIN, "(weights_M * policy.state_head(", "(policy.state_head("),
        Mutant("states: another decision's", TRAIN, "batch.states[i] for i in at_M",
               "batch.states[i - 1] for i in at_M"),
    ],
    UPDATE + "the_state_heads_own_gradient_is_no_part_of_the_norm": [
        Mutant("states: a part of the norm", TRAIN, "not n.startswith(UNCLIPPED)", "True"),
    ],
    POSITIONS + "what_a_seat_knew_is_that_of_its_questions": [
        Mutant("states: of the other seat", KNEW, "known(state, row.seat)", "known(state, 0)"),
        Mutant("states: one ply late", KNEW, "            ply += len(moves)\n", "            ply += 1\n"),
    ],
    POSITIONS + "decisions_of_the_policy_say_at_which_ply_they_were_asked": [
        Mutant("states: of the beginning", TURNS, "ply=len(query.history))", "ply=0)"),
    ],
    UPDATE + "what_is_rehearsed_counts_by_its_mean_token_and_is_told_so": [
        Mutant("rehearsal: by the text", TRAIN, "/ sum(len(text.ids) for text in batch.texts)", "/ len(batch.texts)"),
        Mutant("rehearsal: told of one decision", TRAIN, "kl.detach() * count", "kl.detach()"),
    ],
    RUN + "each_step_rehearses_texts_of_its_own_and_none_with_a_weight_of_zero": [
        Mutant("rehearsal: the same texts for ever", TRAIN, "rehearsal.texts(state.step)", "rehearsal.texts(0)"),
    ],
    REHEARSAL + "texts_are_the_bases_own_whatever_the_adapter_has_become": [
        Mutant("rehearsal: texts of the policy's own", REHEARSE, "    with policy.using(\"base\"):\n        for t",
               "    with policy.using(None):\n        for t"),
        Mutant("rehearsal: the likeliest text", REHEARSE, "weight, u_N, 1.0)", "weight, None, 1.0)"),
    ],
    REHEARSAL + "the_divergence_is_the_librarys_and_vanishes_with_its_gradient_at_the_base": [
        Mutant("rehearsal: the other divergence", REHEARSE,
               "(_logprobs(policy, ids), torch.cat(base),", "(torch.cat(base), _logprobs(policy, ids),"),
        Mutant("rehearsal: from itself", REHEARSE, "    with policy.using(\"base\"):\n        found",
               "    with torch.no_grad():\n        found"),
    ],
    UPDATE + "a_game_in_one_sequence_is_scored_like_its_decisions_one_by_one": [
        Mutant("the last layer sees what comes after", TREE,
               "_cut(which, positions_N[read_N],", "_cut(which, positions_N[read_N][-1:].repeat(len(which)),"),
    ],
    MODEL + "values_and_gradients_of_a_tree_are_those_of_the_library_row_by_row": [
        Mutant("attention: one token of the future", ATTENTION, "> positions[..., None]", "> positions[..., None] + 1"),
        Mutant("attention: padding of a bucket is put back", ATTENTION,
               ".index_select(0, runs.places_N)", "[: len(runs.places_N)]"),
        Mutant("attention: padding of a bucket has gradients", ATTENTION, "x.masked_fill_(run.empty, 0)", "pass"),
        Mutant("attention: a gradient of another temperature", ATTENTION,
               "lse, 0.0, False, attn_mask=mask, scale=scale", "lse, 0.0, False, attn_mask=mask, scale=1.0"),
        Mutant("attention: the last path's gradient only", ATTENTION, "by_kv.index_add_(", "by_kv.index_copy_("),
        Mutant("adapter: gradient of B without its scale", LORA,
               ".copy_(by_B).mul_(scale)", ".copy_(by_B)"),
        Mutant("adapter: the first one's inner part for all", LORA,
               "                start += B_OR.shape[1]\n                by_inner", "                by_inner"),
        Mutant("adapter: frozen weights only", LORA,
               "if B_OR is not None:\n                out_NO", "if False:\n                out_NO"),
        Mutant("SwiGLU: gate and up change places", LAYERS, "mlp.act_fn(gate) * up", "mlp.act_fn(up) * gate"),
        Mutant("norm: no gradient through the mean square", LAYERS,
               "g.mul_(inverse).addcmul_(x, along)", "g.mul_(inverse)"),
    ],
    MODEL + "gradients_of_a_key_in_many_paths_are_added_up_in_fp32": [
        Mutant("attention: gradients added up in bfloat16", ATTENTION,
               "torch.promote_types(k_NHE.dtype, torch.float32)", "k_NHE.dtype"),
    ],
    "tests/policy/test_cache.py::test_many_go_on_from_one_beginning_without_touching_each_other": [
        Mutant("the second conversation writes over the first", "policy/cache.py",
               "self._holders == 0)\n        slots", "self._holders < 2)\n        slots"),
    ],
    # ---- the run
    RUN + "resuming_after_any_step_is_exact": [
        Mutant("optimizer not restored", STATE,
               "        utils.unpack_optimizer(self.optimizer,", "        (lambda *ignored: None)(self.optimizer,"),
        Mutant("curriculum not restored", STATE,
               'self.curriculum.load_state_dict(saved.json("curriculum"))', "pass"),
        Mutant("KL coefficient not restored", STATE,
               "make(TrainerState, state,", "make(TrainerState, state | {'kl_coef': self.ppo.init_kl_coef},"),
        Mutant("reward moments not restored", STATE,
               "make(TrainerState, state,", "make(TrainerState, state | {'moments': {}},"),
        Mutant("rows of metrics twice", STATE,
               "self.metrics.truncate_to(self.state.step - (self.state.row is not None), may_lack=elsewhere)", "pass"),
    ],
    RUN + "resuming_a_finished_run_does_nothing": [
        Mutant("a finished run ends again", TRAIN,
               "partial(is_finished, run_dir, resume, resolved, force_config)", "lambda: False"),
    ],
    RUN + "a_run_in_use_is_refused": [
        Mutant("two runs in one folder", PROCESS, "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    ],
    RUN + "a_changed_knob_is_refused_with_the_difference_unless_forced": [
        Mutant("changed knobs go unnoticed", "training/folder.py", "if refused and not force_config:", "if False:"),
    ],
    RUN + "evaluation_never_sees_a_seed_or_a_random_stream_of_training": [
        Mutant("evaluation on training's random streams", "evaluation/measure.py",
               "index=-next(number)", "index=next(number)"),
        Mutant("evaluation on training's seeds", "curriculum.py", "pair = EVAL_SEEDS.start + 2 *", "pair = 2 *"),
    ],
    BATCH + "failed_episodes_are_left_out_and_too_many_end_the_run": [
        Mutant("failed episodes are losses", TRAIN,
               'valid = [e for e in episodes if e.outcome != "failed"]', "valid = episodes"),
        Mutant("nothing but failures is no failure", "evaluation/measure.py",
               "> max(MAX_FAILED_SHARE * games, games > 1)", "> games"),
    ],
    FAULTS + "games_that_do_not_fit_are_counted_and_the_run_goes_on": [
        Mutant("games that were cut off must have scores", STEP, "[row for row in rows if not row.cut]", "rows"),
    ],
    FAULTS + "training_does_not_need_wandb": [
        Mutant("wandb ends the run", LOGGERS, "        except Exception as exc:", "        except KeyError as exc:"),
    ],
    FAULTS + "a_signal_leaves_a_checkpoint_from_which_the_run_goes_on_exactly": [
        Mutant("a signal does not end the rollout", PROCESS,
               "            raise InterruptedRolloutError\n\n    def act(",
               "            pass\n\n    def act("),
        Mutant("a signal does not end the evaluation", TRAIN,
               "partial(evaluate, self.player(stop),", "partial(evaluate, self.policy,"),
        Mutant("the row of an interrupted evaluation is lost", TRAIN, "row = state.row = state.row or", "row ="),
    ],
    RUN + "what_an_evaluation_had_read_does_not_reach_the_next_step": [
        Mutant("what an evaluation had read reaches the next step", TRAIN,
               "        self.policy.forget()\n        with self", "        with self"),
    ],
    FAULTS + "no_memory_in_the_middle_of_a_step_leaves_the_last_checkpoint_alone": [
        Mutant("half a step is saved as a whole one", TRAIN, "self.midway = True", "pass"),
    ],
    UPDATE + "bad_minibatches_are_counted_in_a_row_across_steps_and_end_the_step": [
        Mutant("bad minibatches are forgotten between steps", TRAIN, '"bad_updates": bad}', '"bad_updates": 0}'),
    ],
    "tests/training/test_ranks.py::test_two_processes_make_the_run_of_one": [
        Mutant("each process follows its own gradient", TRAIN,
               "            ranks.add_up_gradients(named.values(), loss, sums)\n", "            pass\n"),
        Mutant("a minibatch's mean is taken per process", TRAIN,
               "    members = ranks.share(members)\n",
               "    members = ranks.share(members)\n    count = count / ranks.world\n"),
    ],
    # ---- past selves
    "tests/policy/test_player.py::test_a_past_self_stays_as_it_was_and_can_be_written_and_forgotten": [
        Mutant("past selves are trained on", ADAPTERS,
               "set_requires_grad(name, False)", "set_requires_grad(name, True)"),
        Mutant("a past self is a fresh adapter", ADAPTERS,
               "set_peft_model_state_dict(self.peft_model, tensors, adapter_name=name)", "pass"),
    ],
    "tests/training/test_curriculum.py::test_past_selves_that_still_win_are_chosen_first": [
        Mutant("past selves are chosen blindly", "curriculum.py",
               "max((1 - score) ** 2, LEARNABILITY_FLOOR)", "1.0"),
    ],
    BATCH + "games_against_oneself_have_moments_of_their_own": [
        Mutant("one baseline for all opponents", STEP, 'if kind in ("self", "past") else ""', 'if False else ""'),
    ],
    UPDATE + "what_the_update_reads_of_the_legal_mass_is_that_of_a_pass_of_its_own": [
        Mutant("legal mass: the answer that was chosen alone", POLICY,
               "allowed += [choices.get(p, [s.ids[p + 1]])", "allowed += [[s.ids[p + 1]]"),
    ],
}  # fmt: skip


def not_applicable() -> list[str]:
    """The faults whose place in the code is gone or no longer unique."""
    every = [mutant for mutants in MUTANTS.values() for mutant in mutants]
    return [m.fault for m in every if (ROOT / m.file).read_text().count(m.old) != 1]


def copy_tree(target: Path) -> None:
    """Copy what the tests need."""
    skipped = shutil.ignore_patterns(".*", "__pycache__", "runs", "models", "out", "wandb", "docs", "benchmarks")
    shutil.copytree(ROOT, target, ignore=skipped)


def passes(tree: Path, test: str) -> bool:
    """Whether the test passes in the tree.

    Raises:
        RuntimeError: it did not run, which proves nothing.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow", test]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{test} did not run: {(done.stdout + done.stderr)[-500:]}")
    return done.returncode == 0


def outcome(tree: Path, mutant: Mutant, test: str) -> str:
    """``killed``, or what is wrong."""
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return f"NOT APPLIED: {mutant.old!r} occurs {text.count(mutant.old)} times"
    try:
        path.write_text(text.replace(mutant.old, mutant.new))
        return "SURVIVED" if passes(tree, test) else "killed"
    except RuntimeError as error:
        return f"BROKEN: {error}"
    finally:
        path.write_text(text)


def main(words: list[str]) -> int:
    """Print the table; 0 where all are killed, each by a test that passes without the fault."""
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for test, mutants in MUTANTS.items():
            chosen = [m for m in mutants if not words or any(word in m.fault for word in words)]
            sound = bool(chosen) and passes(tree, test)
            for m in chosen:
                results.append(outcome(tree, m, test) if sound else "BROKEN: the test fails without the fault")
                print(f"{m.fault:<46} {m.file:<13} {test.partition('::')[2]:<88} {results[-1]}", flush=True)
    print(f"{results.count('killed')} of {len(results)} killed")
    return int(results.count("killed") < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
