//! Microvms: migrations that succeed, fail on the way and are refused, as for QEMU, with the engine
//! in the VMM.

use std::os::unix::net::UnixStream;

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, MicroPair, Third, await_copying, check_no_userfaultfd, check_refused, check_rights,
    check_untouched, oldest,
};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    BeaconPlace, Godwit, GuestConfig, Link, MicroVm, Movable, Observer, Room, TestVm, VmConfig,
    builds_for, kvm_for, skip,
};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Slow enough that a pre-copy lasts for seconds.
const SLOW: &[&str] = &["--max-bandwidth", "20MiB/s"];
const SMALL: &[&str] = &["--memory", "128MiB", "--mode", "rate", "--working-set", "16MiB"];

fn moves(test: &str, options: &[&str]) -> anyhow::Result<()> {
    let Some(mut pair) = MicroPair::start(test, options)? else { return Ok(()) };
    let (migrate, receive) = pair.migrate(&["--verify"])?;
    pair.check_moved(&migrate)?;
    ensure!(migrate.last()["verified"] == true);
    ensure!(receive.last()["outcome"] == "running", "{}", receive.last());
    ensure!(pair.source.wait(LIMIT)?.success(), "the source ended badly: {}", pair.source.errors());
    Ok(())
}

#[test]
fn an_idle_guest() -> anyhow::Result<()> {
    moves("an_idle_guest", &["--memory", "256MiB", "--mode", "idle"])
}

#[test]
fn a_writing_guest_with_all_witnesses() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("a_writing_guest_with_all_witnesses", SMALL)? else {
        return Ok(());
    };
    let place = BeaconPlace::find(pair.source.ram_file())?;
    let observer = Observer::start(place, pair.source.ram_file(), pair.destination.ram_file())?;
    let (migrate, _) = pair.migrate(&["--verify"])?;
    pair.check_moved(&migrate)?;
    let seen = observer.finish()?;
    ensure!(!seen.ran_on_both, "two guests from one");
    ensure!(seen.switchover.is_some(), "the guest was not seen to move");
    Ok(())
}

#[test]
fn a_move_can_be_looked_at_afterwards() -> anyhow::Result<()> {
    let test = "a_move_can_be_looked_at_afterwards";
    let Some(mut pair) = MicroPair::start(test, SMALL)? else { return Ok(()) };
    let room = Room::new()?;
    let state = room.dir().to_str().context("a path that is text")?;
    pair.godwit = pair.godwit.with_variable("XDG_STATE_HOME", state);
    let done = |godwit: &Godwit, words: &[&str]| -> anyhow::Result<String> {
        Ok(String::from_utf8(godwit.done(words)?.stdout)?)
    };
    let listed = |godwit: &Godwit| -> anyhow::Result<Vec<String>> {
        let list = done(godwit, &["report", "--list", "--json"])?;
        let name =
            |line: &str| serde_json::from_str::<Value>(line).map(|it| it["name"].to_string());
        Ok(list.lines().map(name).collect::<Result<_, _>>()?)
    };
    ensure!(listed(&pair.godwit)?.is_empty());
    let none = pair.godwit.run(&["report"])?;
    let said = String::from_utf8_lossy(&none.stderr);
    ensure!(none.status.code() == Some(1) && said.contains("godwit migrate makes them"), "{said}");

    // What fails is kept as well; what is not to be kept is not.
    let nobody = "127.0.0.1:1";
    for (options, count) in [(&[][..], 1), (&["--record", "off"][..], 1)] {
        pair.godwit.migrate(&pair.source, nobody, options)?.wait(LIMIT)?;
        ensure!(listed(&pair.godwit)?.len() == count, "{:?}", listed(&pair.godwit)?);
    }
    pair.check_untouched()?;
    let page = done(&pair.godwit, &["report", "--out", "-"])?;
    ensure!(page.contains(": failed</h1>") && page.contains(nobody), "{page}");

    let (migrate, _) = pair.migrate(&[])?;
    pair.check_moved(&migrate)?;
    // What came is kept as well, by the destination, which is this host too.
    ensure!(listed(&pair.godwit)?.len() == 3, "{:?}", listed(&pair.godwit)?);
    let list = done(&pair.godwit, &["report", "--list"])?;
    let sides: Vec<_> = list.lines().filter_map(|line| line.split_once("  ")).collect();
    ensure!(sides.iter().filter(|(side, _)| *side == "destination").count() == 1, "{list}");
    ensure!(sides.iter().filter(|(side, _)| *side == "source").count() == 2, "{list}");
    let came = done(&pair.godwit, &["report", "--side", "destination", "--out", "-"])?;
    for wanted in ["The destination's side", ": came in ", "Device state loaded", "<td>0<td>"] {
        ensure!(came.contains(wanted), "{wanted}: {came}");
    }
    let name = sides.iter().find(|(side, _)| *side == "destination").map(|(_, name)| *name);
    let name = name.context("no record of the destination's")?;
    let spans = pair.godwit.run(&["report", name, "--otlp", "http://127.0.0.1:1"])?;
    ensure!(spans.status.code() == Some(1), "a destination's record has no spans: {spans:?}");
    let out = room.dir().join("page.html");
    let path = out.to_str().context("a path that is text")?;
    pair.godwit.done(&["report", "--side", "source", "--out", path])?;
    let page = std::fs::read_to_string(&out)?;
    for wanted in ["gone for", "Where the downtime went", "Memory, round by round", "<th>round"] {
        ensure!(page.contains(wanted), "{wanted}: {page}");
    }
    // Every page that was sent is in the map, and in its round.
    let last = migrate.last();
    let sum = |map: &Value| map.as_array().into_iter().flatten().filter_map(Value::as_u64).sum();
    let mapped: Vec<u64> =
        last["memory_map_pages"].as_array().context("no map")?.iter().map(sum).collect();
    let rounds = last["round_list"].as_array().context("no rounds")?;
    let sent: Vec<u64> = rounds.iter().filter_map(|it| it["data_pages"].as_u64()).collect();
    ensure!(mapped == sent, "{mapped:?} instead of {sent:?}");
    Ok(())
}

/// What a collector is told once, by a path of spans' own.
fn one_export(server: &tiny_http::Server) -> anyhow::Result<Value> {
    let mut request = server.recv_timeout(LIMIT)?.context("nobody came")?;
    ensure!(request.url() == "/v1/traces", "{}", request.url());
    let told: Value = serde_json::from_reader(request.as_reader())?;
    request.respond(tiny_http::Response::from_string("{}"))?;
    Ok(told)
}

#[test]
fn a_collector_is_told_what_a_move_was_made_of() -> anyhow::Result<()> {
    // Mutations: it is told before the end; who started it is forgotten.
    let test = "a_collector_is_told_what_a_move_was_made_of";
    let Some(mut pair) = MicroPair::start(test, SMALL)? else { return Ok(()) };
    let room = Room::new()?;
    let state = room.dir().to_str().context("a path that is text")?;
    let caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    pair.godwit =
        pair.godwit.with_variable("XDG_STATE_HOME", state).with_variable("TRACEPARENT", caller);
    let server = tiny_http::Server::http("127.0.0.1:0").map_err(|error| anyhow::anyhow!(error))?;
    let collector = format!("http://{}", server.server_addr());

    // Nobody listens there: that is said, and the migration has failed by something else.
    let nobody = "127.0.0.1:1";
    let options = ["--otlp", "http://127.0.0.1:1"];
    let failed = pair.godwit.migrate(&pair.source, nobody, &options)?.wait(LIMIT)?;
    let untold = "the OpenTelemetry collector at http://127.0.0.1:1/v1/traces was not told";
    ensure!(failed.errors.contains(untold), "{}", failed.errors);
    ensure!(failed.status.code() == Some(1), "{}", failed.last());

    let told = std::thread::scope(|scope| -> anyhow::Result<Value> {
        let told = scope.spawn(|| one_export(&server));
        let (migrate, _) = pair.migrate(&["--otlp", &collector])?;
        pair.check_moved(&migrate)?;
        told.join().map_err(|_| anyhow::anyhow!("the collector panicked"))?
    })?;
    let resource = &told["resourceSpans"][0];
    let service = json!({ "key": "service.name", "value": { "stringValue": "godwit" } });
    let attributes = resource["resource"]["attributes"].as_array().context("no attributes")?;
    ensure!(attributes.contains(&service), "{told}");
    let spans = resource["scopeSpans"][0]["spans"].as_array().context("no spans")?;
    let named = |name: &str| spans.iter().find(|span| span["name"] == name);
    let whole = named("migrate").context("no span of all")?;
    ensure!(whole["parentSpanId"] == "b7ad6b7169203331", "{whole}");
    for span in spans {
        ensure!(span["traceId"] == "0af7651916cd43dd8448eb211c80319c", "{span}");
    }
    for name in ["set-up", "round 0", "downtime"] {
        let span = named(name).with_context(|| name.to_owned())?;
        ensure!(span["parentSpanId"] == whole["spanId"], "{span}");
    }
    let downtime = named("downtime").context("no downtime")?;
    let part = named("hand over").context("no part of it")?;
    ensure!(part["parentSpanId"] == downtime["spanId"], "{part}");

    // A collector that was not there can be told later.
    let again = std::thread::scope(|scope| -> anyhow::Result<Value> {
        let told = scope.spawn(|| one_export(&server));
        pair.godwit.done(&["report", "--otlp", &collector])?;
        told.join().map_err(|_| anyhow::anyhow!("the collector panicked"))?
    })?;
    let count =
        |told: &Value| told["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().map(Vec::len);
    ensure!(count(&again) == Some(spans.len()), "{again}");
    Ok(())
}

#[test]
fn a_source_that_is_killed_before_the_handover_leaves_no_doubt() -> anyhow::Result<()> {
    let test = "a_source_that_is_killed_before_the_handover_leaves_no_doubt";
    let Some(mut pair) = MicroPair::start(test, SMALL)? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;
    pair.source.kill();
    let migrate = migrate.wait(LIMIT)?;
    // The guest is lost with its machine, as it would be without a migration. It runs nowhere,
    // which is certain.
    check_refused(
        &migrate,
        3,
        &["the guest has ended with its VM at the source", "during pre-copy"],
    )?;
    assert_eq!(
        (&migrate.last()["outcome"], &migrate.last()["guest"]),
        (&"failed".into(), &"ended".into())
    );
    assert_eq!(receive.wait(LIMIT)?.status.code(), Some(1));
    ensure!(pair.destination.status()? == "incoming");
    Ok(())
}

#[test]
fn a_socket_that_is_no_machines_is_refused_and_nothing_is_in_doubt() -> anyhow::Result<()> {
    let test = "a_socket_that_is_no_machines_is_refused_and_nothing_is_in_doubt";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let config = VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Idle));
    let mut vm = TestVm::source(&config)?;
    vm.wait_ready(LIMIT)?;
    let godwit = Godwit::built()?;
    let name = format!("microvm:{}", vm.qmp_socket().display());
    for rest in [["migrate", "--to", "127.0.0.1:1"], ["receive", "--listen", "127.0.0.1:0"]] {
        let [command, option, address] = rest;
        let output = godwit.run(&[command, "--vm", &name, option, address, "--json"])?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1), "{command}: {}: {errors}", output.status);
        ensure!(
            errors.contains("is the QMP monitor of a QEMU") && errors.contains("--vm qemu:PATH"),
            "{errors}"
        );
        let last = String::from_utf8_lossy(&output.stdout);
        ensure!(last.contains("\"outcome\":\"refused\""), "{last}");
    }
    // A monitor that serves somebody else takes the connection, and says nothing.
    let holder = UnixStream::connect(vm.qmp_socket())?;
    let output = godwit.run(&["receive", "--vm", &name, "--listen", "127.0.0.1:0"])?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{}: {errors}", output.status);
    ensure!(errors.contains("does not answer within 5s"), "{errors}");
    drop(holder);
    check_untouched(&mut vm)
}

#[test]
fn a_guest_at_full_speed_under_each_tracker() -> anyhow::Result<()> {
    for tracker in ["kvm-log", "kvm-ring", "pagemap"] {
        let options =
            ["--memory", "128MiB", "--mode", "full", "--working-set", "8MiB", "--tracker", tracker];
        moves("a_guest_at_full_speed_under_each_tracker", &options)?;
    }
    Ok(())
}

#[test]
fn odd_blocks_many_slots_two_vcpus_and_a_disk() -> anyhow::Result<()> {
    let image = std::env::temp_dir().join(format!("godwit-e2e-microvm-{}", std::process::id()));
    std::fs::write(&image, vec![0; 4 << 20])?;
    let disk = image.display().to_string();
    for (tracker, mode) in
        [("kvm-log", "hot-cold"), ("pagemap", "sequential"), ("kvm-ring", "rate")]
    {
        moves(
            "odd_blocks_many_slots_two_vcpus_and_a_disk",
            &[
                ["--block", "name=low,size=33MiB,gpa=0,host-offset=0x3000"],
                ["--block", "name=odd,size=20484KiB,gpa=0x4001000,host-offset=0x1ff000"],
                ["--block", "name=high,size=40MiB,gpa=0x100007000"],
                ["--slots", "300"],
                ["--cpus", "2"],
                ["--disk", &disk],
                ["--tracker", tracker],
                ["--mode", mode],
            ]
            .concat(),
        )?;
    }
    std::fs::remove_file(image)?;
    Ok(())
}

/// Runs `godwit microvm plug` on `vm`: its exit code, what it said, what it complained of.
fn plug(vm: &MicroVm, rest: &[&str]) -> anyhow::Result<(Option<i32>, String, String)> {
    let socket = vm.control_socket().display().to_string();
    let output = Godwit::built()?.run(&[&["microvm", "plug", &socket], rest].concat())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

/// The same for what must succeed; its answer in JSON.
fn plugged(vm: &MicroVm, rest: &[&str]) -> anyhow::Result<serde_json::Value> {
    let (code, told, errors) = plug(vm, &[rest, &["--json"]].concat())?;
    ensure!(code == Some(0), "{rest:?}: {code:?} {errors}");
    Ok(serde_json::from_str(&told)?)
}

/// What this host has left of memory and swap (proc(5)), in bytes.
fn spare_memory() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        let words = text.lines().find_map(|line| line.strip_prefix(name))?;
        words.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    Ok((field("MemAvailable:").unwrap_or(0) + field("SwapFree:").unwrap_or(0)) << 10)
}

#[test]
fn memory_that_is_plugged_in_moves_and_grows_on() -> anyhow::Result<()> {
    for tracker in ["kvm-log", "kvm-ring", "pagemap"] {
        let options = [SMALL, &["--tracker", tracker]].concat();
        let test = "memory_that_is_plugged_in_moves_and_grows_on";
        let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
        let told = plugged(&pair.source, &["32MiB", "--slots", "3"])?;
        assert_eq!(
            told,
            json!({"block": "plugged0", "gpa": 4_u64 << 30, "bytes": 32 << 20, "slots": 4})
        );
        pair.source.wait_plugged(1, LIMIT)?;
        // A machine without that memory is no place for the guest.
        let (migrate, _) = pair.migrate(&[])?;
        check_refused(&migrate, 1, &["'plugged0' of the source does not exist"])?;
        // Slots are each host's own.
        plugged(&pair.destination, &["32MiB"])?;

        let (migrate, _) = pair.migrate(&["--verify"])?;

        pair.check_moved(&migrate)?;
        plugged(&pair.destination, &["16MiB"])?;
        pair.destination.wait_plugged(1, LIMIT)?;
        pair.destination.wait_for_heartbeats_after(std::time::Instant::now(), 3, LIMIT)?;
        ensure!(pair.destination.bugs().is_empty(), "{:?}", pair.destination.bugs());
    }
    Ok(())
}

#[test]
fn memory_is_plugged_in_and_moves_whatever_has_the_ram_files_name() -> anyhow::Result<()> {
    // Regression: each plug opened the RAM files by name, and a migration then read those files.
    let test = "memory_is_plugged_in_and_moves_whatever_has_the_ram_files_name";
    let Some(pair) = MicroPair::start(test, SMALL)? else { return Ok(()) };
    let file = pair.source.ram_file().to_owned();
    let length = std::fs::metadata(&file)?.len();
    std::fs::remove_file(&file)?;
    plugged(&pair.source, &["16MiB"])?;
    // Of the same length, and nobody's memory.
    std::fs::File::create(&file)?.set_len(length)?;
    plugged(&pair.source, &["16MiB"])?;
    pair.source.wait_plugged(2, LIMIT)?;
    plugged(&pair.destination, &["16MiB"])?;
    plugged(&pair.destination, &["16MiB"])?;

    let (migrate, _) = pair.migrate(&["--verify"])?;

    pair.check_moved(&migrate)
}

#[test]
fn thousands_of_slots_are_plugged_in_while_the_guest_runs() -> anyhow::Result<()> {
    let options = [
        ["--memory", "128MiB"],
        ["--slots", "1000"],
        ["--mode", "full"],
        ["--working-set", "8MiB"],
        ["--cpus", "2"],
    ]
    .concat();
    let test = "thousands_of_slots_are_plugged_in_while_the_guest_runs";
    let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
    for vm in [&pair.source, &pair.destination] {
        assert_eq!(plugged(vm, &["48MiB", "--slots", "5000"])?["slots"], 6000);
        assert_eq!(plugged(vm, &["1MiB", "--slots", "9999"])?["slots"], 6256, "one for each page");
    }
    pair.source.wait_plugged(2, LIMIT)?;
    // What cannot be is refused in a line, and nothing has changed.
    for (size, slots, words) in [
        ("160MiB", "40000", "46256 memory slots were asked for, but this KVM has "),
        ("63GiB", "1", "ends beyond 64GiB"),
        ("4KiB", "1", "plug at least 1MiB"),
        ("1025KiB", "1", "whole pages of 4 KiB"),
    ] {
        let (code, told, errors) = plug(&pair.source, &[size, "--slots", slots])?;
        ensure!(code == Some(1) && told.is_empty(), "{size}: {code:?} {told}");
        ensure!(errors.contains(words) && errors.lines().count() == 1, "{size}: {errors}");
    }
    if spare_memory()? < 50 << 30 {
        let (code, _, errors) = plug(&pair.source, &["58GiB"])?;
        ensure!(code == Some(1) && errors.contains("to spare"), "{errors}");
        ensure!(errors.contains("plug less") && errors.lines().count() == 1, "{errors}");
    }
    assert_eq!(pair.source.ask("status")?["slots"], 6256);

    let (migrate, _) = pair.migrate(&["--verify"])?;

    pair.check_moved(&migrate)
}

#[test]
fn nothing_is_plugged_in_while_writes_are_tracked() -> anyhow::Result<()> {
    let test = "nothing_is_plugged_in_while_writes_are_tracked";
    let Some(pair) = MicroPair::start(test, SMALL)? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;
    for vm in [&pair.source, &pair.destination] {
        let (code, _, errors) = plug(vm, &["16MiB"])?;
        ensure!(code == Some(1) && errors.contains("is migrating: wait for that"), "{errors}");
    }
    migrate.signal(Signal::INT)?;
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
    receive.wait(LIMIT)?;
    pair.check_untouched()?;
    // Once that is over, it is.
    for vm in [&pair.source, &pair.destination] {
        plugged(vm, &["16MiB"])?;
    }
    pair.source.wait_plugged(1, LIMIT)?;
    pair.second_attempt()
}

#[test]
fn a_microvm_keeps_the_rights_of_its_work() -> anyhow::Result<()> {
    // Mutation: it keeps all.
    let test = "a_microvm_keeps_the_rights_of_its_work";
    if !rustix::process::geteuid().is_root() {
        skip(test, "only root has rights to give up");
        return Ok(());
    }
    let Some(pair) = MicroPair::start(test, &["--mode", "rate"])? else { return Ok(()) };
    // CAP_DAC_OVERRIDE, CAP_NET_BIND_SERVICE, CAP_SYS_PTRACE, CAP_SYS_NICE, CAP_SYS_RESOURCE.
    check_rights(pair.source.pid(), &[1, 10, 19, 23, 24], &[])?;
    let (migrate, _) = pair.migrate(&["--verify"])?;
    pair.check_moved(&migrate)
}

#[test]
fn a_link_cut_in_pre_copy() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("microvm: a_link_cut_in_pre_copy", SMALL)? else {
        return Ok(());
    };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let link = Link::to(&address)?;
    let migrate = pair.godwit.migrate(&pair.source, link.address(), SLOW)?;
    await_copying(&migrate)?;

    link.cut();

    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
    assert_eq!(migrate.last()["guest"], "source");
    assert_eq!(migrate.last()["phase"], "pre-copy");
    pair.check_untouched()?;
    assert_eq!(receive.wait(LIMIT)?.status.code(), Some(1));
    assert_eq!(pair.destination.status()?, "incoming");
    pair.second_attempt()
}

#[test]
fn the_destination_killed() -> anyhow::Result<()> {
    let Some(mut pair) = MicroPair::start("microvm: the_destination_killed", SMALL)? else {
        return Ok(());
    };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    pair.destination.kill();

    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
    pair.check_untouched()?;
    let receive = receive.wait(LIMIT)?;
    ensure!(receive.errors.contains("did the machine end?"), "{}", receive.errors);
    pair.destination = MicroVm::start(&pair.godwit, &[SMALL, &["--incoming"]].concat())?;
    pair.second_attempt()
}

#[test]
fn ctrl_c_on_either_side() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("microvm: ctrl_c_on_either_side", SMALL)? else {
        return Ok(());
    };
    for at_source in [true, false] {
        let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
        await_copying(&migrate)?;

        if at_source {
            migrate.signal(Signal::INT)?
        } else {
            receive.signal(Signal::INT)?
        }

        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        let (cancelled, told) = if at_source { (&migrate, &receive) } else { (&receive, &migrate) };
        ensure!(cancelled.status.code() == Some(130), "{} {}", cancelled.status, cancelled.errors);
        assert_eq!(cancelled.last()["outcome"], "cancelled");
        ensure!(told.errors.contains("gave up: cancelled"), "{}", told.errors);
        pair.check_untouched()?;
    }
    pair.second_attempt()
}

#[test]
fn the_migrating_command_killed() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("microvm: the_migrating_command_killed", SMALL)? else {
        return Ok(());
    };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let mut migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    // Nobody watches any more: the VMM gives up by itself.
    migrate.kill();

    pair.check_untouched()?;
    assert_eq!(receive.wait(LIMIT)?.status.code(), Some(1));
    pair.second_attempt()
}

#[test]
fn the_link_breaks_at_the_handover() -> anyhow::Result<()> {
    for fault in ["cut-after-commit", "lose-commit", "lose-farewell"] {
        let Some(pair) = MicroPair::start("microvm: the_link_breaks_at_the_handover", SMALL)?
        else {
            return Ok(());
        };
        let (migrate, receive) = pair.migrate(&["--fault", fault])?;
        pair.check_moved(&migrate)?;
        assert_eq!(receive.last()["outcome"], "running", "{fault}");
    }
    Ok(())
}

#[test]
fn a_copy_that_is_not_exact_never_runs() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("microvm: a_copy_that_is_not_exact_never_runs", SMALL)?
    else {
        return Ok(());
    };
    let (migrate, receive) = pair.migrate(&["--verify", "--fault", "wrong-digest"])?;
    ensure!(migrate.errors.contains("NOT exact: 1 of 8 chunks of 16MiB"), "{}", migrate.errors);
    assert_eq!(receive.status.code(), Some(1));
    pair.check_untouched()?;
    assert_eq!(pair.destination.status()?, "incoming");
    pair.second_attempt()
}

#[test]
fn a_source_that_is_kept_never_runs_again() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("microvm: a_source_that_is_kept_never_runs_again", SMALL)?
    else {
        return Ok(());
    };
    let (migrate, _) = pair.migrate(&["--keep-source", "--channels", "1"])?;
    pair.check_moved(&migrate)?;
    assert_eq!(pair.source.status()?, "gone");
    let answer = pair.source.ask("resume")?;
    assert_eq!(answer["error"], "the guest has gone elsewhere: it must not run twice");
    // And neither does it move again.
    let again = pair.godwit.migrate(&pair.source, "127.0.0.1:1", &[])?.wait(LIMIT)?;
    check_refused(&again, 1, &["left by its guest", "the guest runs elsewhere"])
}

#[test]
fn a_paused_guest_arrives_paused() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("microvm: a_paused_guest_arrives_paused", SMALL)? else {
        return Ok(());
    };
    assert_eq!(pair.source.ask("pause")?["answer"], "done");
    let (migrate, receive) = pair.migrate(&["--verify"])?;
    assert_eq!(migrate.last()["outcome"], "migrated", "{}", migrate.errors);
    assert_eq!(receive.last()["outcome"], "paused");
    assert_eq!(pair.destination.status()?, "paused");
    assert_eq!(pair.destination.ask("resume")?["answer"], "done");
    pair.check_moved(&migrate)
}

#[test]
fn machines_that_do_not_fit() -> anyhow::Result<()> {
    let Some(mut pair) = MicroPair::start("machines_that_do_not_fit", SMALL)? else {
        return Ok(());
    };
    // Sizes are compared before anything is copied; the rest when the state is loaded, and the
    // guest runs on.
    let low = "name=ram,size=128MiB,gpa=0";
    let cases: [(&[&str], &str); 4] = [
        (&["--memory", "64MiB"], "has 128MiB at the source and 64MiB at the destination"),
        (
            &["--block", low, "--block", "name=more,size=1MiB,gpa=0x10000000"],
            "RAM blocks that the source has not",
        ),
        (
            &["--block", "name=ram,size=128MiB,gpa=0", "--cpus", "2"],
            "start both with the same --cpus",
        ),
        (
            &["--block", "name=other,size=128MiB,gpa=0"],
            "RAM block 'ram' of the source does not exist",
        ),
    ];
    for (options, words) in cases {
        pair.destination = MicroVm::start(&pair.godwit, &[options, &["--incoming"]].concat())?;
        let (migrate, _) = pair.migrate(&[])?;
        check_refused(&migrate, 1, &[words])?;
        pair.check_untouched()?;
    }
    Ok(())
}

/// Leaves at once, so slowly that its memory takes seconds to follow.
/// Connections that are lost are made again.
const FOLLOWED: &[&str] = &[
    "--postcopy",
    "now",
    "--max-bandwidth",
    "20MiB/s",
    "--compression",
    "none",
    "--reconnect",
    "60s",
];

fn follows(line: &Value) -> bool {
    line["stage"] == "post-copy"
}

#[test]
fn a_guest_leaves_by_post_copy_and_can_leave_again() -> anyhow::Result<()> {
    // Mutation: what the balloon gives back is punched out of the file without a word.
    let test = "a_guest_leaves_by_post_copy_and_can_leave_again";
    let busy = ["--memory", "128MiB", "--cpus", "2", "--mode", "full", "--working-set", "32MiB"];
    let churn = ["--memory", "128MiB", "--mode", "churn", "--balloon", "hints,reporting"];
    let by = |tracker| [&busy[..], &["--tracker", tracker]].concat();
    for (options, after) in [
        (churn.to_vec(), "now"),
        (by("kvm-log"), "after 1"),
        (by("kvm-ring"), "after 1"),
        (by("pagemap"), "after 1"),
    ] {
        let Some(mut pair) = MicroPair::start(test, &options)? else { return Ok(()) };
        let moved = [&["--postcopy", after], &FOLLOWED[2..]].concat();
        let (migrate, receive) = pair.migrate(&moved)?;
        pair.check_moved(&migrate).with_context(|| format!("{options:?}"))?;
        let (sent, came) = (&migrate.last()["post_copy"], &receive.last()["fetched"]);
        println!("{options:?}: {sent} {came}");
        ensure!(sent["missing_bytes"].as_u64() > Some(0), "{}", migrate.last());
        ensure!(sent["missing_bytes"] == came["missing_bytes"], "{sent} {came}");
        ensure!(came["faults"].as_u64() > Some(0), "{came}");
        // Free pages that are reported meanwhile do not come any more.
        let given = came["discarded_pages"].as_u64();
        ensure!(options != churn || given > Some(0), "{came}");
        ensure!(pair.source.wait(LIMIT)?.success(), "{}", pair.source.errors());
        check_no_userfaultfd(pair.destination.pid())?;
        let third = MicroVm::start(&pair.godwit, &[&options[..], &["--incoming"]].concat())?;
        pair.source = std::mem::replace(&mut pair.destination, third);
        pair.second_attempt()?;
    }
    Ok(())
}

/// A small machine with a balloon, whose queue is in guest memory.
const BALLOONED: &[&str] =
    &["--memory", "128MiB", "--mode", "rate", "--working-set", "16MiB", "--balloon", "reporting"];

/// Of a machine that has a part of a guest's memory: what it says of itself, and that it is not
/// ended without a word.
fn check_in_two_places(pair: &MicroPair, vm: &MicroVm, state: &str) -> anyhow::Result<()> {
    let status = vm.ask("status")?;
    ensure!(status["state"] == state, "{status}");
    // Mutation: it asks the guest, and writes to its memory.
    ensure!(status["balloon"].is_null(), "{status}");
    for request in ["quit", "pause"] {
        let said = vm.ask(request)?;
        ensure!(said["answer"] == "refused", "{request}: {said}");
    }
    let socket = vm.control_socket();
    let resumed = pair.godwit.run(&["microvm", "resume", "--force", &socket.to_string_lossy()])?;
    ensure!(!resumed.status.success(), "a guest was resumed on its way");
    Ok(())
}

fn end(pair: &MicroPair, vm: &MicroVm) -> anyhow::Result<()> {
    let socket = vm.control_socket();
    pair.godwit.done(&["microvm", "quit", "--force", &socket.to_string_lossy()]).map(drop)
}

#[test]
fn a_link_that_is_cut_while_memory_follows_is_waited_for_whoever_watches() -> anyhow::Result<()> {
    // Mutation: the death of the command cancels what has left.
    let test = "a_link_that_is_cut_while_memory_follows_is_waited_for_whoever_watches";
    let Some(mut pair) = MicroPair::start(test, BALLOONED)? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let link = Link::to(&address)?;
    let migrate = pair.godwit.migrate(&pair.source, link.address(), FOLLOWED)?;
    migrate.wait_for("the guest to run there", LIMIT, follows)?;
    link.cut();
    receive.wait_for("severed", LIMIT, |line: &Value| line["event"] == "severed")?;
    check_in_two_places(&pair, &pair.source, "follows")?;
    check_in_two_places(&pair, &pair.destination, "lacks-pages")?;
    migrate.signal(Signal::KILL)?;
    drop(migrate.wait(LIMIT)?);
    std::thread::sleep(std::time::Duration::from_secs(2));
    link.mend();
    let receive = receive.wait(LIMIT)?;
    ensure!(receive.last()["outcome"] == "running", "{} {}", receive.last(), receive.errors);
    ensure!(pair.destination.status()? == "running");
    ensure!(pair.source.wait(LIMIT)?.success(), "{}", pair.source.errors());
    pair.destination.wait_for_heartbeats_after(std::time::Instant::now(), 3, LIMIT)?;
    ensure!(pair.destination.bugs().is_empty(), "{:?}", pair.destination.bugs());
    check_no_userfaultfd(pair.destination.pid())
}

#[test]
fn a_guest_whose_source_ends_before_its_memory_came_is_lost_and_called_so() -> anyhow::Result<()> {
    let test = "a_guest_whose_source_ends_before_its_memory_came_is_lost_and_called_so";
    let Some(mut pair) = MicroPair::start(test, SMALL)? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, FOLLOWED)?;
    migrate.wait_for("the guest to run there", LIMIT, follows)?;
    pair.source.kill();
    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.last()["guest"] == "lost", "{} {}", migrate.last(), migrate.errors);
    // It waits for a source that may only be far away, and says what it lacks; its machine is ended
    // by hand.
    receive.wait_for("severed", LIMIT, |line: &Value| line["event"] == "severed")?;
    let lacks = receive.wait_for("lacks", LIMIT, |line: &Value| line["event"] == "lacks")?;
    let runs = lacks["missing"][0]["runs"].as_array().cloned().unwrap_or_default();
    let pages: u64 = runs.iter().filter_map(|run| run[1].as_u64()).sum();
    ensure!(pages > 0 && lacks["left_bytes"] == pages * 4096, "{lacks}");
    ensure!(pair.destination.status()? == "lacks-pages");
    end(&pair, &pair.destination)?;
    ensure!(pair.destination.wait(LIMIT)?.success(), "{}", pair.destination.errors());
    let receive = receive.wait(LIMIT)?;
    ensure!(receive.status.code() == Some(3), "{}", receive.last());
    ensure!(receive.errors.contains("the guest is LOST"), "{}", receive.errors);
    Ok(())
}

#[test]
fn a_guest_whose_source_ends_has_the_rest_from_the_copy() -> anyhow::Result<()> {
    // Mutation: the machine is not told where the copy is.
    let test = "a_guest_whose_source_ends_has_the_rest_from_the_copy";
    let Some(mut pair) = MicroPair::start(test, SMALL)? else { return Ok(()) };
    let third = Third::new()?;
    let [option, place] = third.option();
    let safe = [option.as_str(), place.as_str()];
    let (receive, address) = pair.godwit.receive(&pair.destination, &safe)?;
    let options = [FOLLOWED, &safe].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
    migrate.wait_for("the guest to run there", LIMIT, follows)?;
    ensure!(third.files()? == 1, "no copy");
    pair.source.kill();
    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.last()["guest"] == "destination", "{} {}", migrate.last(), migrate.errors);
    let copy = receive.wait_for("the copy", LIMIT, |line: &Value| line["event"] == "copy")?;
    ensure!(copy["why"].is_null(), "{copy}");
    let until = std::time::Instant::now() + LIMIT;
    while third.files()? > 0 && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    ensure!(third.files()? == 0, "the copy stays");
    pair.destination.wait_for_heartbeats_after(std::time::Instant::now(), 3, LIMIT)?;
    ensure!(pair.destination.bugs().is_empty(), "{:?}", pair.destination.bugs());
    // The source is waited for, which may only be far away.
    ensure!(pair.destination.status()? == "running", "{}", pair.destination.status()?);
    Ok(())
}

#[test]
fn a_guest_whose_destination_ends_before_its_memory_came_is_lost_and_never_run_again()
-> anyhow::Result<()> {
    // Mutations: a machine that ends says nothing to the other side; a source that knows runs it.
    let test = "a_guest_whose_destination_ends_before_its_memory_came_is_lost_and_never_run_again";
    let Some(mut pair) = MicroPair::start(test, SMALL)? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, FOLLOWED)?;
    migrate.wait_for("the guest to run there", LIMIT, follows)?;
    end(&pair, &pair.destination)?;
    ensure!(pair.destination.wait(LIMIT)?.success(), "{}", pair.destination.errors());
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    ensure!(migrate.last()["guest"] == "lost", "{} {}", migrate.last(), migrate.errors);
    ensure!(receive.errors.contains("the guest is LOST"), "{}", receive.errors);
    ensure!(pair.source.status()? == "lost");
    let socket = pair.source.control_socket();
    let again = ["microvm", "resume", "--force", &socket.to_string_lossy()];
    let again = pair.godwit.run(&again)?;
    let words = String::from_utf8_lossy(&again.stderr).into_owned();
    ensure!(words.contains("the guest is lost"), "{words}");
    ensure!(pair.source.ask("quit")?["answer"] == "done");
    ensure!(pair.source.wait(LIMIT)?.success(), "{}", pair.source.errors());
    Ok(())
}

#[test]
fn a_destination_that_refuses_the_state_awaits_nothing_any_more() -> anyhow::Result<()> {
    let test = "a_destination_that_refuses_the_state_awaits_nothing_any_more";
    let more = [SMALL, &["--cpus", "2"]].concat();
    let Some(mut pair) = MicroPair::start_apart(test, SMALL, &more)? else { return Ok(()) };
    let (migrate, _) = pair.migrate(FOLLOWED)?;
    check_refused(&migrate, 1, &["start both with the same --cpus"])?;
    pair.check_untouched()?;
    check_no_userfaultfd(pair.destination.pid())?;
    ensure!(pair.destination.status()? == "incoming");
    // The same machine takes its own guest in, whole.
    let twin = MicroVm::start(&pair.godwit, &more)?;
    twin.wait_ready(LIMIT)?;
    drop(std::mem::replace(&mut pair.source, twin));
    pair.second_attempt()
}

#[test]
fn exchanged_and_missing_machines() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("exchanged_and_missing_machines", SMALL)? else {
        return Ok(());
    };
    let exchanged = pair.godwit.migrate(&pair.destination, "127.0.0.1:1", &[])?.wait(LIMIT)?;
    check_refused(&exchanged, 1, &["are source and destination exchanged?"])?;
    let nobody = pair.godwit.migrate(&pair.source, "127.0.0.1:1", &[])?.wait(LIMIT)?;
    check_refused(&nobody, 1, &["cannot connect to 127.0.0.1:1"])?;
    pair.check_untouched()
}

#[test]
fn a_guest_that_triple_faults() -> anyhow::Result<()> {
    if !kvm_for("a_guest_that_triple_faults") {
        return Ok(());
    }
    let mut vm = MicroVm::start(&Godwit::built()?, &["--memory", "32MiB", "--mode", "crash"])?;
    let status = vm.wait(LIMIT)?;
    ensure!(status.code() == Some(4), "{status}");
    let errors = vm.errors();
    ensure!(errors.contains("triple fault") && errors.lines().count() == 1, "{errors}");
    Ok(())
}

#[test]
fn machines_that_cannot_be() -> anyhow::Result<()> {
    if !kvm_for("machines_that_cannot_be") {
        return Ok(());
    }
    let cases: [(&[&str], &str); 5] = [
        (&["--memory", "1MiB"], "at least 16MiB at guest address 0"),
        (&["--cpus", "99"], "99 vCPUs do not do: use 1 to 32"),
        (&["--disk", "/nonexistent"], "cannot be opened for writing"),
        (
            &["--block", "name=a,size=16MiB,gpa=0", "--block", "name=b,size=4KiB,gpa=0x1000"],
            "overlap",
        ),
        (&["--fill", "1GiB"], "use a smaller --fill or more --memory"),
    ];
    for (options, words) in cases {
        let error = MicroVm::start(&Godwit::built()?, options).err();
        let error = error.map_or_else(String::new, |error| error.to_string());
        ensure!(error.contains(words), "{options:?}: {error}");
    }
    Ok(())
}
