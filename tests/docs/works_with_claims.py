"""All else on the page "Works with": what works, how far, and the tests that show it."""

from __future__ import annotations

from typing import NamedTuple


class Claim(NamedTuple):
    """A row: what works, how far, and the tests that show it."""

    name: str
    how_far: str
    tests: tuple[str, ...]  # as ``file::function``
    in_readme: str = ""  # its name there; empty: it is left out


def integration(*tests: str) -> tuple[str, ...]:
    return tuple("tests/integration/test_" + test.replace("::", ".py::test_") for test in tests)


def outside(*tests: str) -> tuple[str, ...]:
    return tuple("tests/outside/test_" + test.replace("::", ".py::test_") for test in tests)


NOT_TESTED = "not tested"
EACH_CELL = "nodes::each_cell_of_the_table_of_strategies_says_what_a_run_shows"
LOGGED = "logger_files::what_is_logged_is_in_the_loggers_files"

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "Where the loader comes from": (
        Claim(
            "a data module",
            "yes",
            integration("callback_attachment::the_users_data_module_is_echoed_as_by_an_echo_data_module"),
        ),
        Claim(
            "the model's own `train_dataloader`",
            "yes",
            integration("callback_attachment::every_fresh_example_of_a_models_own_loader_is_used_factor_times"),
        ),
        Claim(
            "one loader that is passed to `fit`",
            "yes",
            integration("loaders_passed_to_fit::a_loader_is_echoed_as_by_an_echo_data_module"),
        ),
        Claim(
            "several loaders that are passed to `fit`",
            "refused by `EchoCallback`; `EchoDataModule.from_dataloaders` takes them",
            integration(
                "loaders_passed_to_fit::several_loaders_are_refused_before_the_first_step_with_the_ways_out",
                "collections::a_collection_can_be_passed_to_from_dataloaders",
            ),
        ),
        Claim(
            "Hugging Face's accelerate, and the `Trainer` of transformers",
            "yes, by `EchoLoader`",
            outside("transformers::a_trainer_of_transformers_is_echoed_and_resumes_exactly_with_our_state"),
        ),
        Claim(
            "Fabric",
            "yes, by `EchoLoader`",
            integration("data_examples::each_rank_of_fabric_echoes_its_part_of_the_data"),
        ),
        Claim(
            "the package `pytorch_lightning`",
            "`EchoCallback` is refused; `EchoLoader` works",
            integration("callback_attachment::a_trainer_of_the_package_pytorch_lightning_is_refused_with_the_ways_out"),
        ),
    ),
    "Ranks and nodes": (
        Claim(
            "`ddp`, on one node and on several",
            "yes",
            integration("ddp::fresh_examples_of_two_ranks_are_disjoint_and_together_complete", EACH_CELL),
            "`ddp` on one node and several",
        ),
        Claim("`ddp_spawn`, `ddp_fork`, `ddp_notebook`", "yes", integration(EACH_CELL), "`ddp_spawn`, `ddp_fork`"),
        Claim("`ModelParallelStrategy` with FSDP2", "yes", integration(EACH_CELL), "FSDP2"),
        Claim(
            "`ModelParallelStrategy` with tensor parallelism",
            "yes",
            integration("tensor_parallel::echoed_too_both_ranks_get_the_same_batches_the_noise_included", EACH_CELL),
            "tensor parallelism",
        ),
        Claim("started by torchrun, by Slurm, or by Lightning", "yes", integration(EACH_CELL), "torchrun, Slurm"),
        Claim(
            "torchrun starts the job again after a rank was killed",
            "yes, exactly",
            integration("elastic::after_a_rank_is_killed_the_job_goes_on_from_its_last_checkpoint_bit_by_bit"),
        ),
        Claim("Ray Train", "yes", integration("ray_train::two_workers_on_two_nodes_divide_the_data"), "Ray Train"),
        Claim("`fsdp`, PyTorch's first FSDP, which needs a GPU", NOT_TESTED, ()),
        Claim("`deepspeed`", NOT_TESTED, ()),
        Claim(
            "one GPU",
            "the tests are there, but no machine with a GPU was at hand",
            (
                "tests/gpu/test_gpu_after_transfer.py::test_a_fresh_batch_is_copied_once_and_an_echo_never",
                "tests/gpu/test_gpu_synchronisation.py::test_no_step_waits_for_the_device",
            ),
        ),
    ),
    "Resuming": (
        Claim(
            "a run with workers that was killed within an epoch",
            "exactly",
            integration("resume::a_killed_run_with_workers_resumes_exactly"),
        ),
        Claim(
            "a checkpoint of `ModelCheckpoint` after a validation",
            "exactly",
            integration("resume::a_checkpoint_that_model_checkpoint_wrote_after_validation_resumes_exactly"),
        ),
        Claim("several ranks", "exactly", integration("ddp::two_ranks_resume_exactly_from_what_rank_zero_saved")),
        Claim(
            "another number of workers or ranks, another batch size",
            "with a warning; nothing of the pass is left out",
            integration(
                "resume::another_number_of_workers_resumes_with_a_warning_and_leaves_nothing_out",
                "resume::another_batch_or_buffer_size_resumes_with_a_warning_and_leaves_nothing_out",
                "ddp::a_checkpoint_of_two_ranks_resumes_on_one_with_a_warning_and_leaves_nothing_out",
            ),
        ),
        Claim("another data set", "refused", integration("resume::another_data_set_is_refused")),
        Claim(
            "with echoing after a run without, and the reverse",
            "yes",
            integration("callback_resume::a_run_resumes_with_and_without_echoing_the_data_modules_state_included"),
        ),
    ),
    "What a Trainer does besides": (
        Claim(
            "`limit_train_batches`, `max_steps`, `val_check_interval`",
            "yes",
            integration(
                "trainer_epochs::a_limited_epoch_is_followed_by_the_batch_where_it_stopped",
                "trainer_epochs::max_steps_ends_the_run_at_that_batch",
                "trainer_epochs::validation_within_an_epoch_moves_nothing",
            ),
        ),
        Claim(
            "`accumulate_grad_batches`, manual optimization",
            "yes",
            integration(
                "trainer_epochs::accumulated_gradients_step_after_the_same_batches",
                "trainer_epochs::manual_optimization_sees_the_same_batches_and_ends_at_the_same_weights",
            ),
        ),
        Claim(
            "`OneCycleLR` over `trainer.estimated_stepping_batches`",
            "yes",
            integration("trainer_epochs::a_one_cycle_schedule_of_the_estimated_length_ends_with_the_run"),
        ),
        Claim(
            "`EarlyStopping`, `ModelCheckpoint`, `LearningRateMonitor`, stochastic weight averaging",
            "yes",
            integration(
                "trainer_callbacks::early_stopping_ends_the_run_after_whole_epochs",
                "trainer_callbacks::model_checkpoint_saves_within_epochs_at_their_ends_and_for_the_best",
                "trainer_callbacks::the_learning_rate_monitor_logs_what_it_logs_without_echoing",
                "trainer_callbacks::stochastic_weight_averaging_takes_its_extra_epoch_over_the_data",
            ),
        ),
        Claim(
            "`Tuner.lr_find`, `Tuner.scale_batch_size`",
            "yes, with `EchoDataModule` or `EchoCallback`",
            integration(
                "tuner::the_learning_rate_finder_leaves_position_and_counts_as_they_were",
                "tuner::every_batch_size_that_is_tried_takes_effect",
            ),
        ),
        Claim("`overfit_batches`", "switches echoing off", integration("callback_attachment::overfit_batches_are_not_echoed")),
        Claim(
            "a precision plugin, at `after_transfer`",
            "converts each fresh batch once",
            integration("after_transfer::a_precision_plugin_converts_each_fresh_batch_once"),
        ),
        Claim(
            "two Trainers in threads of one process",
            "yes, with a data module and a callback each",
            integration("two_trainers::two_trainers_with_data_modules_and_callbacks_of_their_own_do_not_disturb_each_other"),
        ),
    ),
    "Configuration": (
        Claim(
            "LightningCLI",
            "yes",
            integration("examples::an_unchanged_cli_program_echoes_by_a_callback_on_its_command_line"),
            "LightningCLI",
        ),
        Claim("`EchoCLI`", "yes", integration("cli::a_factor_on_the_command_line_echoes_the_data_module")),
        Claim(
            "Hydra",
            "yes",
            integration("hydra_example::a_run_echoes_by_its_overrides_and_the_saved_config_reproduces_it"),
            "Hydra",
        ),
        Claim(
            "OmegaConf",
            "yes",
            integration("examples::an_omegaconf_program_echoes_by_its_yaml_file_and_the_saved_config_reproduces_the_run"),
            "OmegaConf",
        ),
        Claim(
            "Slurm's requeueing",
            "yes, exactly",
            integration("slurm::a_job_that_is_requeued_in_mid_epoch_twice_ends_as_one_that_nobody_interrupts"),
            "Slurm's requeueing",
        ),
        Claim(
            "Optuna",
            "yes, its trials share their reading",
            integration("sharing_studies::the_study_of_the_example_has_one_reader_in_processes_and_in_threads"),
            "Optuna",
        ),
        Claim(
            "Ray Tune",
            "yes, its trials share their reading",
            integration("ray_sharing::four_trials_of_ray_tune_on_two_nodes"),
            "Ray Tune",
        ),
    ),
    "Loggers": (
        Claim("CSV", "metrics, options", integration(LOGGED), "CSV"),
        Claim(
            "TensorBoard",
            "metrics, options, summary, picture",
            integration(
                LOGGED,
                "callback::tensorboard_has_the_summary_as_a_text",
                "run_pictures::tensorboard_has_it_at_the_last_step",
            ),
            "TensorBoard",
        ),
        Claim(
            "Weights & Biases, offline",
            "metrics, options, summary, picture",
            integration(
                LOGGED,
                "logger_files::the_summary_is_a_text_in_the_files_of_mlflow_and_wandb",
                "run_pictures::weights_and_biases_has_it_among_the_files_that_it_would_send",
            ),
            "W&B",
        ),
        Claim(
            "MLflow",
            "metrics, options, summary, picture",
            integration(
                LOGGED,
                "logger_files::the_summary_is_a_text_in_the_files_of_mlflow_and_wandb",
                "run_pictures::mlflow_has_it_among_the_artifacts",
            ),
            "MLflow",
        ),
        Claim(
            "Comet",
            "the summary, tested with a stand-in for the logger",
            ("tests/unit/training/test_logger_texts.py::test_each_logger_is_given_the_text_as_it_takes_it",),
        ),
    ),
    "Cache and shared reading": (
        Claim(
            "a cache that the ranks of a node share",
            "yes",
            integration("cache_ranks::the_ranks_of_a_node_hold_each_example_once_and_the_other_node_holds_its_own"),
        ),
        Claim(
            "a cache that is divided among nodes (`partitioned=True`)",
            "yes",
            integration("partitioned_trainer::a_training_sees_the_same_and_learns_the_same_as_without_a_cache"),
        ),
        Claim(
            "a cache in a file, for the next job",
            "yes",
            integration("cache_kept::the_next_job_has_no_miss_and_the_same_batches"),
        ),
        Claim(
            "trainings that share their reading, each with a batch size and factor of its own",
            "yes",
            integration(
                "sharing::each_training_gets_every_example_once_in_one_order",
                "sharing::each_training_echoes_as_much_as_it_wants",
            ),
        ),
        Claim(
            "trainings that share a stream",
            "yes",
            integration("sharing_streams::each_training_gets_every_example_once_in_one_order"),
        ),
        Claim(
            "shared reading on the ranks of one node",
            "yes",
            integration("sharing_ranks::the_ranks_divide_each_pass_and_have_equally_many_steps"),
        ),
        Claim(
            "shared reading on another system than Linux",
            "refused",
            integration("sharing::on_another_system_it_is_refused_with_the_reason"),
        ),
        Claim("`cache` and `share` together", "refused", integration("sharing::share_and_cache_are_refused_together")),
    ),
    "Data of other projects": (
        Claim(
            "PyTorch Geometric",
            "yes",
            outside("torch_geometric::its_data_module_is_echoed_before_its_random_transform"),
            "PyTorch Geometric",
        ),
        Claim(
            "MONAI",
            "yes",
            outside("monai_data::the_deterministic_part_is_reused_and_the_noise_redone"),
            "MONAI",
        ),
        Claim(
            "TorchIO",
            "yes; its `Queue` ignores its index, which is said",
            outside("torchio::its_random_transforms_are_redone"),
            "TorchIO",
        ),
        Claim(
            "Lhotse",
            "yes, by whole batches; resumes within a pass in torchdata's `StatefulDataLoader`",
            outside("lhotse::in_torchdatas_loader_a_killed_run_goes_on_exactly"),
            "Lhotse",
        ),
        Claim(
            "Kornia",
            "yes, in the hooks of model or data module, and in a data set",
            outside("kornia::augmentation_in_the_models_hook_is_redone_for_each_use_at_any_point"),
            "Kornia",
        ),
        Claim("Lightly", "yes", outside("lightly::the_views_are_redone_where_they_are_taken_out_as_the_message_says"), "Lightly"),
        Claim("TorchGeo", "yes", outside("torchgeo::its_data_module_for_scenes_augments_every_use"), "TorchGeo"),
        Claim(
            "Albumentations", "yes, seeded from the plan", outside("albumentations::it_is_redone_for_each_use"), "Albumentations"
        ),
        Claim("PyTorch Forecasting", "yes", outside("pytorch_forecasting::windows_come_as_they_are"), "PyTorch Forecasting"),
        Claim(
            "PyTorch Metric Learning",
            "yes",
            outside("pytorch_metric_learning::whole_batches_stay_as_they_were_arranged"),
            "PyTorch Metric Learning",
        ),
        Claim(
            "mosaicml-streaming",
            "yes; a new loader for each resume",
            ("tests/outside/test_mosaicml_streaming.py::TestMosaicmlStreaming",),
            "mosaicml-streaming",
        ),
        Claim("litdata", "yes", ("tests/outside/test_litdata.py::TestLitdata",), "litdata"),
        Claim("WebDataset", "yes; it has no state", outside("webdataset::every_way_in_takes_it"), "WebDataset"),
    ),
}
