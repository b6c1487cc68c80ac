"""All else on the page "Works with": what works, how far, and the tests that show it."""

from __future__ import annotations

from typing import NamedTuple

NOT_TESTED = "not tested"


class Claim(NamedTuple):
    """A row: what works, how far, and the tests that show it."""

    name: str
    how_far: str
    tests: tuple[str, ...]  # as ``file::function``
    in_readme: str  # its name there; empty: it is left out


# Sections; in each, what works | how far | its name in the README (=: the same); below it the tests that show it, of
# tests/integration or of the folder that is named.
_TABLE = """
Where the loader comes from
a data module | yes
    callback_attachment::the_training_loader_is_echoed_as_by_an_echo_data_module
the model's own `train_dataloader` | yes
    callback_attachment::the_training_loader_is_echoed_as_by_an_echo_data_module
one loader that is passed to `fit` | yes
    callback_attachment::the_training_loader_is_echoed_as_by_an_echo_data_module
several loaders that are passed to `fit` | refused by `EchoCallback`; `EchoDataModule.from_dataloaders` takes them
    loaders_passed_to_fit::several_loaders_are_refused_before_the_first_step_with_the_ways_out
    collections::a_collection_can_be_passed_to_from_dataloaders
Hugging Face's accelerate, and the `Trainer` of transformers | yes, by `EchoLoader`
    outside/transformers::a_trainer_of_transformers_is_echoed_and_resumes_exactly_with_our_state
Fabric | yes, by `EchoLoader`
    data_examples::each_rank_of_fabric_echoes_its_part_of_the_data
`import pytorch_lightning` in place of `import lightning` | yes | `lightning` and `pytorch_lightning`
    unit/training/packages::our_classes_are_subclasses_of_both
    run_command::a_program_of_pytorch_lightning_is_echoed_too
a program without an edit, by `lightning-echo run` | yes
    run_command::a_program_is_echoed_as_if_it_had_the_callback

Ranks and nodes
`ddp`, on one node and on several | yes | `ddp` on one node and several
    ddp::fresh_examples_of_two_ranks_are_disjoint_and_together_complete_and_no_noise_is_shared
    nodes::each_cell_of_the_table_of_strategies_says_what_a_run_shows
`ddp_spawn`, `ddp_fork`, `ddp_notebook` | yes | `ddp_spawn`, `ddp_fork`
    nodes::each_cell_of_the_table_of_strategies_says_what_a_run_shows
`ModelParallelStrategy` with FSDP2 | yes | FSDP2
    nodes::each_cell_of_the_table_of_strategies_says_what_a_run_shows
`ModelParallelStrategy` with tensor parallelism | yes | tensor parallelism
    tensor_parallel::echoed_too_both_ranks_get_the_same_batches_the_noise_included
    nodes::each_cell_of_the_table_of_strategies_says_what_a_run_shows
started by torchrun, by Slurm, or by Lightning | yes | torchrun, Slurm
    nodes::each_cell_of_the_table_of_strategies_says_what_a_run_shows
torchrun starts the job again after a rank was killed | yes, exactly
    elastic::after_a_rank_is_killed_the_job_goes_on_from_its_last_checkpoint_bit_by_bit
Ray Train | yes | =
    ray_train::two_workers_on_two_nodes_divide_the_data
`fsdp`, PyTorch's first FSDP, which needs a GPU | not tested
`deepspeed` | not tested
one GPU | run once, on an H100; what failed there is fixed, but was not run again
    gpu/gpu_after_transfer::a_fresh_batch_is_copied_once_and_an_echo_never
    gpu/gpu_synchronisation::no_step_waits_for_the_device

Resuming
a run with workers that was killed within an epoch | exactly
    resume::a_run_with_workers_resumes_exactly
a checkpoint of `ModelCheckpoint` after a validation | exactly
    resume::a_checkpoint_that_model_checkpoint_wrote_after_validation_resumes_exactly
several ranks | exactly
    ddp::two_ranks_resume_exactly_from_what_rank_zero_saved
another number of workers or ranks, another batch size | with a warning; nothing of the pass is left out
    resume::other_options_than_the_saved_ones_resume_with_a_warning_and_leave_nothing_out
    ddp::a_checkpoint_of_two_ranks_resumes_on_one_with_a_warning_and_leaves_nothing_out
another data set | refused
    resume::another_data_set_is_refused
with echoing after a run without, and the reverse | yes
    callback_resume::a_run_resumes_with_and_without_echoing_the_data_modules_state_included

What a Trainer does besides
`limit_train_batches`, `max_steps`, `val_check_interval` | yes
    trainer_epochs::options_that_count_batches_count_as_without_echoing_and_move_nothing
`accumulate_grad_batches`, manual optimization | yes
    trainer_epochs::options_that_count_batches_count_as_without_echoing_and_move_nothing
    trainer_epochs::manual_optimization_sees_the_same_batches_and_ends_at_the_same_weights
`OneCycleLR` over `trainer.estimated_stepping_batches` | yes
    trainer_epochs::a_one_cycle_schedule_of_the_estimated_length_ends_with_the_run
`EarlyStopping`, `ModelCheckpoint`, `LearningRateMonitor`, stochastic weight averaging | yes
    trainer_callbacks::early_stopping_ends_the_run_after_whole_epochs
    trainer_callbacks::model_checkpoint_saves_within_epochs_at_their_ends_and_for_the_best
    trainer_callbacks::the_learning_rate_monitor_logs_what_it_logs_without_echoing
    trainer_callbacks::stochastic_weight_averaging_takes_its_extra_epoch_over_the_data
`Tuner.lr_find`, `Tuner.scale_batch_size` | yes, with `EchoDataModule` or `EchoCallback`
    tuner::the_learning_rate_finder_leaves_counts_as_they_were_beside_a_callback
    tuner::every_batch_size_that_is_tried_takes_effect
`overfit_batches` | switches echoing off
    callback_attachment::overfit_batches_are_the_same_few_and_neither_echoed_nor_controlled
a precision plugin, at `after_transfer` | converts each fresh batch once
    after_transfer::a_precision_plugin_converts_each_fresh_batch_once
two Trainers in threads of one process | yes, with a data module and a callback each
    two_trainers::two_trainers_with_data_modules_and_callbacks_of_their_own_do_not_disturb_each_other

Configuration
LightningCLI | yes | =
    examples::an_unchanged_cli_program_echoes_by_a_callback_on_its_command_line
`EchoCLI` | yes
    cli::a_factor_on_the_command_line_echoes_the_data_module
Hydra | yes | =
    hydra_example::a_run_echoes_by_its_overrides_and_the_saved_config_reproduces_it
OmegaConf | yes | =
    examples::an_omegaconf_program_echoes_by_its_yaml_file_and_the_saved_config_reproduces_the_run
Slurm's requeueing | yes, exactly | =
    slurm::a_job_that_is_requeued_in_mid_epoch_twice_ends_as_one_that_nobody_interrupts
Optuna | yes, its trials share their reading | =
    sharing_studies::the_study_of_the_example_has_one_reader_in_processes_and_in_threads
Ray Tune | yes, its trials share their reading | =
    ray_sharing::four_trials_of_ray_tune_on_two_nodes

Loggers
CSV | metrics, options | =
    logger_files::what_is_logged_is_in_the_loggers_files
TensorBoard | metrics, options, summary, picture | =
    logger_files::what_is_logged_is_in_the_loggers_files
    callback::tensorboard_has_the_summary_as_a_text
    run_pictures::tensorboard_has_it_at_the_last_step
Weights & Biases, offline | metrics, options, summary, picture | W&B
    logger_files::what_is_logged_is_in_the_loggers_files
    logger_files::the_summary_is_a_text_in_the_files_of_mlflow_and_wandb
    run_pictures::weights_and_biases_has_it_among_the_files_that_it_would_send
MLflow | metrics, options, summary, picture | =
    logger_files::what_is_logged_is_in_the_loggers_files
    logger_files::the_summary_is_a_text_in_the_files_of_mlflow_and_wandb
    run_pictures::mlflow_has_it_among_the_artifacts
Comet | the summary, tested with a stand-in for the logger
    unit/training/logger_texts::each_logger_is_given_the_text_as_it_takes_it

Cache and shared reading
a cache that the ranks of a node share | yes
    cache_ranks::the_ranks_of_a_node_hold_each_example_once_and_the_other_node_holds_its_own
a cache that is divided among nodes (`partitioned=True`) | yes
    partitioned_trainer::a_training_sees_the_same_and_learns_the_same_as_without_a_cache
a cache in a file, for the next job | yes
    cache_kept::the_next_job_has_no_miss_and_the_same_batches
trainings that share their reading, each with a batch size and factor of its own | yes
    sharing::each_training_gets_every_example_once_in_one_order
    sharing::each_training_echoes_as_much_as_it_wants
trainings that share a stream | yes
    sharing_streams::each_training_gets_every_example_once_in_one_order
shared reading on the ranks of one node | yes
    sharing_ranks::the_ranks_divide_each_pass_and_have_equally_many_steps
shared reading on another system than Linux | refused
    sharing::on_another_system_it_is_refused_with_the_reason
`cache` and `share` together, over data that is read by index | yes
    sharing_cache::trainings_get_the_same_with_and_without_it_and_it_is_not_read_again

Data of other projects
PyTorch Geometric | yes | =
    outside/torch_geometric::its_data_module_is_echoed_before_its_random_transform
MONAI | yes | =
    outside/monai_data::the_deterministic_part_is_reused_and_the_noise_redone
TorchIO | yes; its `Queue` ignores its index, which is said | =
    outside/torchio::its_random_transforms_are_redone
Lhotse | yes, by whole batches; resumes within a pass in torchdata's `StatefulDataLoader` | =
    outside/lhotse::in_torchdatas_loader_a_killed_run_goes_on_exactly
Kornia | yes, in the hooks of model or data module, and in a data set | =
    outside/kornia::augmentation_in_the_models_hook_is_redone_for_each_use_at_any_point
Lightly | yes | =
    outside/lightly::the_views_are_redone_where_they_are_taken_out_as_the_message_says
TorchGeo | yes | =
    outside/torchgeo::its_data_module_for_scenes_augments_every_use
Albumentations | yes, seeded from the plan | =
    outside/albumentations::it_is_redone_for_each_use
PyTorch Forecasting | yes | =
    outside/pytorch_forecasting::windows_come_as_they_are
Darts | yes, by `pl_trainer_kwargs` | =
    outside/darts::windows_come_as_they_are
NeuralForecast | yes, by the model's `callbacks` | =
    outside/neuralforecast::series_come_as_they_are
PyTorch Tabular | yes, by `fit(callbacks=...)` | =
    outside/pytorch_tabular::rows_come_as_they_are
SchNetPack | yes, with the oldest versions alone: it runs with no newer torch
    outside/schnetpack::molecules_come_as_they_are
PyTorch Metric Learning | yes | =
    outside/pytorch_metric_learning::whole_batches_stay_as_they_were_arranged
mosaicml-streaming | yes; a new loader for each resume | =
    outside/mosaicml_streaming::TestMosaicmlStreaming
litdata | yes | =
    outside/litdata::TestLitdata
WebDataset | yes; it has no state | =
    outside/webdataset::every_way_in_takes_it
"""


def _whole(test: str) -> str:
    """``file::function`` of a line of the table."""
    file, _, name = test.strip().partition("::")
    folder, _, stem = file.rpartition("/")
    return f"tests/{folder or 'integration'}/test_{stem}.py::{name if name.startswith('Test') else f'test_{name}'}"


def _read(table: str) -> dict[str, tuple[Claim, ...]]:
    found: dict[str, tuple[Claim, ...]] = {}
    for section in table.strip().split("\n\n"):
        title, *lines = section.splitlines()
        claims: list[Claim] = []
        for line in lines:
            if line.startswith(" "):
                claims[-1] = claims[-1]._replace(tests=(*claims[-1].tests, _whole(line)))
            else:
                name, how_far, in_readme = (cell.strip() for cell in f"{line} |".split("|")[:3])
                claims.append(Claim(name, how_far, (), name if in_readme == "=" else in_readme))
        found[title] = tuple(claims)
    return found


CLAIMS = _read(_TABLE)
