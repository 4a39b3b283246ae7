"""The places of the defences of what is written, who may write it, and in which order."""

from __future__ import annotations

from tests.crash.defences import Case

WRITING = (
    Case(
        "file fsync",
        "a written object is not synced",
        "storage/local_files.py",
        "                self._check_is_whole()\n                sync_descriptor(self._descriptor)\n",
        "                self._check_is_whole()\n",
        (
            "tests/storage/test_local_order.py::test_finish_syncs_after_the_last_write_and_sync_folder_syncs_the_folder",
            "tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",
        ),
    ),
    Case(
        "file fsync",
        "a writer is closed and not finished",
        "saving/conveyor.py",
        "            self._writer.finish()",
        "            self._writer.abandon()",
        (
            "tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",
            "tests/crash/test_every_crash_state.py::test_a_power_cut_leaves_a_usable_run[79]",
        ),
    ),
    Case(
        "folder fsync",
        "no folder is synced",
        "storage/local.py",
        (
            'with translated("sync the folder", self._where(path)), self._folder(names) as folder:\n'
            "            sync_descriptor(folder)"
        ),
        ('with translated("sync the folder", self._where(path)), self._folder(names):\n            pass'),
        (
            "tests/storage/test_local_order.py::test_finish_syncs_after_the_last_write_and_sync_folder_syncs_the_folder",
            "tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",
        ),
    ),
    Case(
        "folder fsync",
        "the folder of the objects",
        "saving/write.py",
        "    storage.sync_folder(generation_path(generation))\n",
        "",
        ("tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",),
    ),
    Case(
        "folder fsync",
        "the folder of the generations",
        "saving/save.py",
        "    context.storage.sync_folder(GENERATIONS)\n",
        "",
        (
            "tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",
            "tests/crash/test_every_crash_state.py::test_a_power_cut_leaves_a_usable_run[79]",
        ),
    ),
    Case(
        "folder fsync",
        "the folder of the manifest",
        "saving/publish.py",
        "        storage.sync_folder(generation_path(manifest.generation))\n",
        "",
        (
            "tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",
            "tests/crash/test_every_crash_state.py::test_a_power_cut_leaves_a_usable_run[79]",
        ),
    ),
    Case(
        "folder fsync",
        "the folder of what was resumed",
        "joining/claim.py",
        ("    storage.sync_folder(INCARNATIONS)\n    return own"),
        "    return own",
        ("tests/crash/test_every_crash_state.py::test_a_power_cut_leaves_a_usable_run[43]",),
    ),
    Case(
        "folder fsync",
        "the folders of a run",
        "joining/claim.py",
        ('        storage.make_folder(folder)\n    storage.sync_folder("")\n'),
        "        storage.make_folder(folder)\n",
        ("tests/crash/test_every_crash_state.py::test_a_power_cut_leaves_a_usable_run[79]",),
        (('    storage.sync_folder("")\n    return record.run', "    return record.run"),),
    ),
    Case(
        "folder fsync",
        "the folder of a mark",
        "retention/mark.py",
        "    storage.sync_folder(generation_path(record.generation))\n",
        "",
        ("tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",),
    ),
    Case(
        "folder fsync",
        "a folder after deletions",
        "retention/sweep.py",
        "        storage.sync_folder(folder)\n",
        "        pass\n",
        ("tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",),
    ),
    Case(
        "folder fsync",
        "the folder of a deleted folder",
        "retention/sweep.py",
        "        storage.sync_folder(GENERATIONS)\n",
        "",
        ("tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",),
    ),
    Case(
        "folder fsync",
        "the folders above a root",
        "storage/local.py",
        "                _sync_parent(folder, is_made=is_made)\n",
        "                pass\n",
        ("tests/storage/test_local_failures.py::test_a_root_is_made_durable_from_the_deepest_folder_that_was_there",),
    ),
    Case(
        "fsync before rename",
        "a record gets its name before its bytes are durable",
        "storage/local.py",
        ("                if is_synced:\n                    sync_descriptor(descriptor)\n"),
        "",
        (
            "tests/storage/test_local_order.py::test_publish_writes_syncs_and_only_then_gives_the_name",
            "tests/crash/test_order_of_syncs.py::test_all_that_a_save_relies_on_is_synced_before",
        ),
    ),
    Case(
        "fsync before rename",
        "a record made in its place",
        "storage/local.py",
        ("                write_all(descriptor, memoryview(data))\n                sync_descriptor(descriptor)\n"),
        "                write_all(descriptor, memoryview(data))\n",
        (
            "tests/storage/test_local_failures.py::test_without_links_and_exclusive_renames_an_object_is_created_exclusively",
        ),
    ),
    Case(
        "exclusive create",
        "an object",
        "storage/local.py",
        "_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL |",
        "_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT |",
        ("tests/storage/test_conformance.py::TestLocalStorage::test_a_taken_name_is_never_given_again",),
    ),
    Case(
        "exclusive create",
        "a record by link",
        "storage/local_naming.py",
        "os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)",
        "os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)",
        ("tests/storage/test_local_order.py::test_publish_writes_syncs_and_only_then_gives_the_name",),
    ),
    Case(
        "exclusive create",
        "a record by rename",
        "storage/local_naming.py",
        "_RENAME_NOREPLACE = 1",
        "_RENAME_NOREPLACE = 0",
        (
            "tests/storage/test_local_failures.py::test_without_hard_links_a_name_is_given_by_a_rename_that_replaces_nothing",
        ),
    ),
    Case(
        "read-back",
        "a manifest after its publish",
        "saving/publish.py",
        "        is_ours = _is_ours(storage, path, data)",
        "        is_ours = True",
        (
            "tests/saving/test_publish.py::test_an_error_after_the_name_was_given_is_an_unknown_outcome",
            "tests/crash/test_failing_storage.py::test_a_short_write_at_each_write_of_a_save_leaves_the_checkpoints",
        ),
    ),
    Case(
        "read-back",
        "a record after a lost answer",
        "joining/claim.py",
        "        if not _holds(storage, path, data):",
        "        if False:",
        ("tests/joining/test_claim.py::test_of_two_starts_at_once_the_lower_living_number_goes_on",),
    ),
    Case(
        "ballot",
        "of another generation",
        "format/ballot.py",
        "found = (ballot.run, ballot.generation, ballot.incarnation, ballot.world_size)",
        "found = (ballot.run, generation, ballot.incarnation, ballot.world_size)",
        (
            "tests/format/test_ballot.py::test_a_foreign_refusing_or_repeated_ballot_aborts",
            "tests/saving/test_vote.py::test_one_ballot_that_is_foreign_refusing_or_repeated_aborts",
        ),
    ),
    Case(
        "ballot",
        "of another incarnation",
        "format/ballot.py",
        "found = (ballot.run, ballot.generation, ballot.incarnation, ballot.world_size)",
        "found = (ballot.run, ballot.generation, incarnation, ballot.world_size)",
        (
            "tests/format/test_ballot.py::test_a_foreign_refusing_or_repeated_ballot_aborts",
            "tests/saving/test_vote.py::test_one_ballot_that_is_foreign_refusing_or_repeated_aborts",
        ),
    ),
    Case(
        "ballot",
        "of a rank twice or not at all",
        "format/ballot.py",
        "    if ranks != list(range(world_size)):",
        "    if False:",
        ("tests/format/test_ballot.py::test_a_missing_or_additional_ballot_aborts",),
    ),
    Case(
        "ballot",
        "that refuses",
        "format/ballot.py",
        "        if ballot.refusal:",
        "        if False:",
        ("tests/format/test_ballot.py::test_a_refusal_names_the_rank_and_its_reason",),
    ),
    Case(
        "ballot",
        "in the place of another rank",
        "saving/vote.py",
        "        if ballot.rank != place:",
        "        if False:",
        ("tests/saving/test_vote.py::test_ballots_that_two_ranks_exchanged_abort",),
    ),
    Case(
        "incarnation",
        "before a folder is made",
        "saving/save.py",
        (
            "    check_not_fenced(context.storage, context.claim, ambient=context.ambient)\n"
            "    context.storage.make_folder"
        ),
        "    context.storage.make_folder",
        ("tests/joining/test_claim.py::test_a_takeover_fences_the_old_process_and_its_next_save_publishes_nothing",),
    ),
    Case(
        "incarnation",
        "before the manifest is published",
        "saving/publish.py",
        (
            "    data = seal(manifest)\n"
            "    path = generation_path(manifest.generation, MANIFEST)\n"
            "    check_not_fenced(storage, claim, ambient=ambient)\n"
        ),
        ("    data = seal(manifest)\n    path = generation_path(manifest.generation, MANIFEST)\n"),
        ("tests/joining/test_claim.py::test_a_takeover_in_the_middle_of_a_save_lets_it_publish_nothing",),
    ),
    Case(
        "incarnation",
        "after the manifest is published",
        "saving/publish.py",
        (
            "        is_ours = _is_ours(storage, path, data)\n"
            "        check_not_fenced(storage, claim, ambient=ambient)\n"
        ),
        "        is_ours = _is_ours(storage, path, data)\n",
        ("tests/joining/test_claim.py::test_a_publish_that_comes_late_is_reported_as_fenced_and_never_chosen",),
    ),
    Case(
        "incarnation",
        "before a start records what it resumed",
        "joining/claim.py",
        ("    check_not_fenced(storage, claim, ambient=ambient)\n    own ="),
        "    own =",
        ("tests/joining/test_claim.py::test_a_rival_that_closes_its_claim_does_not_end_a_start",),
    ),
    Case(
        "incarnation",
        "before a mark",
        "retention/mark.py",
        "            check_not_fenced(storage, Claim(run, incarnation))\n",
        "            pass\n",
        ("tests/retention/test_mark.py::test_a_newer_start_ends_the_marking",),
    ),
    Case(
        "incarnation",
        "before a deletion",
        "retention/sweep.py",
        "            stopped = stopped or _newer_start(storage, incarnation)\n",
        "",
        ("tests/retention/test_sweep.py::test_a_start_that_joins_during_a_sweep_ends_it_before_the_next_generation",),
    ),
    Case(
        "incarnation",
        "before a sweep",
        "retention/sweep.py",
        "    newer = _newer_start(storage, incarnation)\n",
        '    newer = ""\n',
        ("tests/retention/test_sweep.py::test_a_newer_start_ends_the_sweep",),
        (("            stopped = stopped or _newer_start(storage, incarnation)\n", ""),),
    ),
    Case(
        "incarnation",
        "that explains a failed save",
        "saving/commit.py",
        ("        try:\n            check_not_fenced(context.storage, context.claim, ambient=context.ambient)\n"),
        ("        try:\n            pass\n"),
        ("tests/joining/test_claim.py::test_a_publish_that_comes_after_its_folder_was_swept_publishes_nothing",),
    ),
    Case(
        "incarnation",
        "the run of a folder that was replaced",
        "joining/claim.py",
        ("        if run == claim.run:\n            return None\n"),
        "        return None\n",
        ("tests/saving/test_discard.py::test_a_folder_that_holds_another_run_by_now_gets_nothing_of_ours",),
    ),
    Case(
        "incarnation",
        "a second start is let in beside a living one",
        "joining/claim.py",
        ("    if not takeover:\n        _refuse_beside"),
        ("    if False:\n        _refuse_beside"),
        ("tests/joining/test_holder.py::test_a_holder_that_runs_refuses_a_newcomer_and_is_named",),
    ),
    Case(
        "incarnation",
        "a start does not look again",
        "joining/claim.py",
        ("        if not takeover:\n            again ="),
        ("        if False:\n            again ="),
        ("tests/joining/test_claim.py::test_of_two_starts_at_once_the_lower_living_number_goes_on",),
    ),
)
