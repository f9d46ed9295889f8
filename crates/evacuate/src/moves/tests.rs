//! Files of moves, whose locks say who is under way.

use super::*;

/// Waits while a lock that was let go of is still held: the child that another test starts has
/// this process's locks until it runs its program.
fn await_lock(mut is_held: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while is_held() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_move_that_was_found_not_to_have_begun_does_not_begin() {
    let directory = std::env::temp_dir().join(format!("godwit-burnt-{}", std::process::id()));
    let new = || Moves::new(&directory, "x", Path::new("/bin/true"), Path::new("/run"));
    let (mut stopped, mut next) = (new().unwrap(), new().unwrap());
    let plan = crate::runner::tests::plan();
    let attempt = Attempt { vm: 0, to: 0, number: 1 };
    assert_eq!(next.look(&plan, &attempt), Look::NeverBegan);
    let rate = Rate::from_bytes_per_second(1e6);
    let why = stopped.begin(&plan, &attempt, rate).unwrap_err();
    assert!(why.contains("another coordinator has gone on"), "{why}");
    await_lock(|| next.look(&plan, &attempt) == Look::Moving);
    assert_eq!(next.look(&plan, &attempt), Look::NeverBegan);
    // The other way round it is found, though it has said nothing yet.
    let second = Attempt { number: 2, ..attempt };
    let held = claim(&next.file(&plan.vms[0], &second), "").unwrap().unwrap();
    assert_eq!(next.look(&plan, &second), Look::Moving);
    assert!(next.clear().unwrap_err().contains("its process lives"));
    drop(held);
    await_lock(|| next.clear().is_err_and(|why| why.contains("its process lives")));
    next.clear().unwrap();
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn another_plan_of_a_name_is_refused_while_its_moves_are_under_way() {
    // Mutation: each plan looks at its own files alone.
    let parent = std::env::temp_dir().join(format!("godwit-beside-{}", std::process::id()));
    let new = |files: &str| {
        Moves::new(&parent.join(files), "x", Path::new("/bin/true"), Path::new("/run")).unwrap()
    };
    let (one, other) = (new("moves-1"), new("moves-2"));
    std::fs::write(parent.join("report.json"), "").unwrap();
    assert_eq!((one.check_alone(), other.check_alone()), (Ok(()), Ok(())));
    let attempt = Attempt { vm: 0, to: 0, number: 1 };
    let file = one.file(&crate::runner::tests::plan().vms[0], &attempt);
    let held = claim(&file, "").unwrap().unwrap();
    assert_eq!(one.check_alone(), Ok(()));
    let why = other.check_alone().unwrap_err();
    assert!(why.contains("moves-1/vm0.1.jsonl is of another evacuation named 'x'"), "{why}");
    drop(held);
    await_lock(|| other.check_alone().is_err());
    assert_eq!(other.check_alone(), Ok(()));
    std::fs::remove_dir_all(parent).unwrap();
}

#[test]
fn a_guest_whose_mover_was_killed_has_moved_if_its_destination_says_that_it_runs() {
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt;

    use crate::plan::{PlannedDestination, PlannedVm};

    let directory = std::env::temp_dir().join(format!("godwit-settle-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let godwit = directory.join("godwit");
    std::fs::write(&godwit, "#!/bin/sh\necho '{\"known\":\"gone\"}'\n").unwrap();
    std::fs::set_permissions(&godwit, PermissionsExt::from_mode(0o755)).unwrap();
    let mut moves = Moves::new(&directory, "x", &godwit, Path::new("/run")).unwrap();
    let vm = PlannedVm {
        name: "a".to_owned(),
        vm: "qemu:/a".to_owned(),
        memory_bytes: 1,
        data_bytes: 1,
        dirty_bytes_per_second: 0.0,
        cpu: None,
        group: None,
        disks: BTreeMap::new(),
        receivers: BTreeMap::new(),
    };
    let east = PlannedDestination {
        name: "east".to_owned(),
        room_bytes: 1,
        cpus: Vec::new(),
        at_once: 1,
        groups: Vec::new(),
    };
    let plan = Plan {
        bytes_per_second: 1.0,
        at_once: 1,
        cpu_percent: None,
        options: Vec::new(),
        vms: vec![vm],
        destinations: vec![east],
        forecast_seconds: 0.0,
        began_ms: 0,
        home: None,
    };
    let attempt = Attempt { vm: 0, to: 0, number: 1 };
    std::fs::write(directory.join("a.1.jsonl"), "{\"event\":\"progress\"}\n").unwrap();
    // As `godwit receive --json` ends.
    for (last, moved) in [("running", true), ("paused", true), ("failed", false)] {
        let line = format!("{{\"outcome\":\"{last}\"}}\n");
        std::fs::write(directory.join("a@east.receive"), line).unwrap();
        let look = moves.look(&plan, &attempt);
        assert_eq!(look == Look::Moved, moved, "{last}: {look:?}");
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_file_is_locked_for_as_long_as_its_process_lives_and_says_what_it_said() {
    let directory = std::env::temp_dir().join(format!("godwit-moves-{}", std::process::id()));
    let mut moves = Moves::new(&directory, "x", Path::new("/bin/true"), Path::new("/run")).unwrap();
    let path = directory.join("a.1.jsonl");
    assert!(matches!(said(&path).unwrap(), Said::Nothing));
    let mut command = Command::new("/bin/sh");
    let script = "echo '{\"event\":\"progress\"}'; read -r line < \"$0\"; \
                  echo '{\"outcome\":\"migrated\"}'";
    command.args(["-c", script]);
    let gate = directory.join("gate");
    assert!(Command::new("mkfifo").arg(&gate).status().unwrap().success());
    command.arg(&gate);
    moves.start(command, &path).unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while !matches!(said(&path).unwrap(), Said::Lives(lines) if lines.len() == 1) {
        assert!(Instant::now() < until);
    }
    let again = moves.start(Command::new("/bin/true"), &path).unwrap_err();
    assert!(again.contains("belongs to a process that lives"), "{again}");
    std::fs::write(&gate, "go\n").unwrap();
    while !matches!(said(&path).unwrap(), Said::Ended(lines) if lines.len() == 2) {
        assert!(Instant::now() < until);
    }
    std::fs::remove_dir_all(directory).unwrap();
}
