"""Which cases of a test belong to the quick suite, where each of many takes seconds."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, where Ctrl-C could not be tested
    signal.signal(signal.SIGINT, signal.default_int_handler)

QUICK = {
    "test_ensembles_of_every_architecture_are_right": 3,
    "test_an_ensemble_of_networks_that_draw": 4,
    "test_the_packed_runner_lays_its_channels_side_by_side": 0,
    "test_every_layer_has_the_weights_of_the_formula": 2,
    "test_frozen_predictions_are_distributed_as_draws_are": 0,
    "test_a_smoothed_network_is_packed": 1,
    "test_a_network_compiles_whole": 0,
    "test_heads_and_smoothing_compose": 0,
    "test_two_processes_agree_on_the_best_epoch_and_on_the_last": 0,
    "test_networks_whose_speeds_are_compared_are_laid_out_alike": 0,
    "test_a_mask_may_come_with_some_batches_alone": 3,
    "test_check_proves_hard_networks_right": 6,
    "test_torchs_attention": 6,
    "test_each_member_predicts_and_learns_as_it_does_alone": 7,
    "test_adapters_that_peft_wrote_become_members": 2,
    "test_members_are_narrow_models_of_their_class_that_are_saved_and_loaded": 6,
    "test_what_comes_before_the_first_member_layer_runs_once": 8,
    "test_the_page_of_many_methods_is_small": 0,
    "test_learned_quantiles_are_near_the_true_ones": 0,
    "test_mapie_trains_a_regressor_itself_fold_by_fold": 0,
    "test_pyramidnet_has_the_papers_counts": 0,
    "test_a_large_mlp_has_the_papers_counts": 0,
    "test_a_tunnel_is_where_the_mean_loss_along_its_lines_is_lowest": 0,
    "test_points_that_walk_alone_leave_ridges_between_them": 0,
    "test_members_of_a_transformer_predict_and_learn_as_each_alone": 1,
    "test_members_of_such_networks_are_narrow_and_themselves_alone": 12,
    "test_ensemble_sizes_are_table_3s": 0,
    "test_a_study_file_can_be_carried_out_at_both_scales": 1,
    "test_temporal_smoothing_makes_predictions_on_a_noisy_video_more_consistent_and_more_often_right": 0,
    "test_two_processes_train_as_one_with_batches_of_twice_the_size": 0,
    "test_every_method_has_the_times_of_predicting_and_training_beside_a_single_network": 0,
    "test_the_nll_never_rises": 0,
    "test_bench_measures_in_multiples_of_the_single_network": 0,
    "test_a_grid_search_takes_numbers_of_numpy_and_refits_the_best": 0,
    "test_a_zero_centred_network_learns_though_its_expectations_say_nothing": 0,
    "test_pixels_go_in_and_the_answers_of_predict_come_out": 0,
    "test_a_job_that_was_killed_ends_as_if_it_had_not_been": 0,
    "test_six_methods_are_highlighted_the_single_network_among_them": 0,
    "test_the_page_drops_an_image_and_says_what_is_wrong_with_one": 0,
    "test_the_page_of_addresses_loads_nothing_from_elsewhere": 0,
    "test_values_are_predicted_as_by_the_network": 1,
    "test_a_composition_learns": 3,
    "test_the_page_asks_for_the_token_of_a_server": 0,
    "test_networks_of_several_inputs_are_called_by_name_or_number": 0,
    "test_texts_get_the_answers_of_predict": 0,
    "test_other_inputs_are_answered_as_by_the_network": 10,
    "test_members_and_draws_multiply": 4,
    "test_a_training_that_was_interrupted_ends_like_one_that_was_not": 4,
    "test_weights_have_the_mixtures_mean_and_variance": 4,
    "test_every_figure_is_drawn_within_its_frame": 2,
    "test_outputs_are_normal_with_the_mean_and_variance_of_eq_21_to_24": 10,
    "test_a_file_answers_batches_of_any_size_as_the_network_does": 1,
    "test_one_output_that_8_bits_ruin_is_not_hidden_by_a_larger_one": 2,
    "test_masks_of_any_kind_that_leave_nothing_of_a_row": 1,
    "test_ids_that_are_wrong_inside_are_refused_as_by_the_network": 3,
}
"""How many cases of a test are quick; the others are slow."""


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name in QUICK:
            seen[name] += 1
            if seen[name] > QUICK[name]:
                item.add_marker(pytest.mark.slow)
