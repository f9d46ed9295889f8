//! Guests that outrun the link are throttled and arrive; and a migration that runs can be asked,
//! changed, switched over and cancelled. With QEMU and with microvms.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, MicroPair, Pair, await_copying, check_moved, check_untouched};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    CpuTime, Ended, Godwit, GuestConfig, Movable, Running, TestVm, VmConfig, builds_for,
};
use serde_json::Value;

/// What would never end by itself.
const ENDLESS: &[&str] = &[
    "--max-bandwidth",
    "20MiB/s",
    "--compression",
    "none",
    "--downtime-limit",
    "5ms",
    "--patience",
    "0s",
    "--throttle",
    "off",
];

/// Two machines of one kind, the first with a guest that writes as fast as it can.
enum Machines {
    Qemu(Box<Pair>),
    Microvm(Box<MicroPair>),
}

/// Which QEMUs a test needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Qemus {
    /// QEMU's part in it differs from version to version.
    All,
    /// It is about what godwit itself does.
    Newest,
}

/// All kinds that there are here, each started when the one before is through: guests at full speed
/// would take each other's processor.
fn machines(test: &str, qemus: Qemus) -> impl Iterator<Item = anyhow::Result<Machines>> {
    let mut builds = builds_for(test);
    if qemus == Qemus::Newest {
        builds.drain(..builds.len().saturating_sub(1));
    }
    let of_qemu = builds.into_iter().map(|build| {
        // Shown where the test fails.
        println!("with {build}");
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Full));
        Ok(Machines::Qemu(Box::new(Pair::start(&config)?)))
    });
    let test = format!("microvm: {test}");
    let microvms = std::iter::once_with(move || {
        println!("with microvms");
        let options = ["--memory", "128MiB", "--mode", "full", "--working-set", "64MiB"];
        Ok(MicroPair::start(&test, &options)?.map(|pair| Machines::Microvm(Box::new(pair))))
    });
    of_qemu.chain(microvms.filter_map(Result::transpose))
}

impl Machines {
    fn godwit(&self) -> &Godwit {
        match self {
            Self::Qemu(pair) => &pair.godwit,
            Self::Microvm(pair) => &pair.godwit,
        }
    }

    fn source(&self) -> &dyn Movable {
        match self {
            Self::Qemu(pair) => &pair.source,
            Self::Microvm(pair) => &pair.source,
        }
    }

    fn destination(&self) -> &dyn Movable {
        match self {
            Self::Qemu(pair) => &pair.destination,
            Self::Microvm(pair) => &pair.destination,
        }
    }

    /// A migration under `name`, with `options`, that is copying.
    fn start(&self, name: &str, options: &[&str]) -> anyhow::Result<(Running, Running)> {
        let (receive, address) = self.godwit().receive(self.destination(), &[])?;
        let options = [&["--name", name], options].concat();
        let migrate = self.godwit().migrate(self.source(), &address, &options)?;
        await_copying(&migrate)?;
        Ok((migrate, receive))
    }

    fn check_moved(&mut self, migrate: &Ended) -> anyhow::Result<()> {
        match self {
            Self::Qemu(pair) => check_moved(pair, migrate),
            Self::Microvm(pair) => pair.check_moved(migrate),
        }
    }

    fn check_untouched(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Qemu(pair) => check_untouched(&mut pair.source),
            Self::Microvm(pair) => pair.check_untouched(),
        }
    }

    /// Runs a command that is to be refused with one line that contains `words`.
    fn refused(&self, arguments: &[&str], words: &str) -> anyhow::Result<()> {
        let output = self.godwit().run(arguments)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1), "{arguments:?}: {}", output.status);
        ensure!(
            errors.contains(words) && errors.trim().lines().count() == 1,
            "{arguments:?}: {errors}"
        );
        Ok(())
    }

    fn done(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        self.godwit().done(arguments)
    }

    /// What `godwit status` says of `name`.
    fn status(&self, name: &str) -> anyhow::Result<Value> {
        let output = self.done(&["status", "--migration", name, "--json"])?;
        Ok(serde_json::from_slice::<Value>(&output.stdout)?["migrations"][0].clone())
    }
}

/// A name for the migrations of one test.
fn name(test: &str) -> String {
    format!("{test}-{}", std::process::id())
}

#[test]
fn a_busy_guest_is_throttled_and_arrives() -> anyhow::Result<()> {
    for machines in machines("a_busy_guest_is_throttled_and_arrives", Qemus::All) {
        let mut machines = machines?;
        // No match for a guest at full speed, also where that shares its processor with another
        // test.
        let link = ["--max-bandwidth", "20MiB/s", "--compression", "none"];
        let options = [&link[..], &["--downtime-limit", "200ms", "--verify"]].concat();
        let (migrate, receive) = machines.start(&name("throttled"), &options)?;
        let migrate = migrate.wait(LIMIT)?;
        machines.check_moved(&migrate)?;
        ensure!(receive.wait(LIMIT)?.status.success());
        ensure!(migrate.last()["throttled_ms"].as_f64() > Some(0.0), "{}", migrate.last());
        ensure!(migrate.last()["lost_ms"].as_f64() > Some(0.0), "{}", migrate.last());
    }
    Ok(())
}

/// Where a migration of this user's can be asked.
fn socket(name: &str) -> PathBuf {
    let user = rustix::process::getuid();
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(|path| PathBuf::from(path).join("godwit"));
    let own = own.unwrap_or_else(|| format!("/tmp/godwit-{}", user.as_raw()).into());
    let directory = if user.is_root() { "/run/godwit".into() } else { own };
    directory.join(format!("{name}.sock"))
}

/// Asks at a control socket, as programs do; the lines that come in answer.
fn asked(socket: &Path, request: &str) -> anyhow::Result<impl Iterator<Item = Value> + use<>> {
    let mut stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
    stream.set_read_timeout(Some(LIMIT))?;
    writeln!(stream, "{request}")?;
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    Ok(lines.filter_map(|line| serde_json::from_str(&line).ok()))
}

#[test]
fn a_migration_is_steered() -> anyhow::Result<()> {
    for machines in machines("a_migration_is_steered", Qemus::Newest) {
        let mut machines = machines?;
        let name = name("steered");
        let of = ["--migration", name.as_str()];
        let (migrate, receive) = machines.start(&name, ENDLESS)?;

        let watch = machines.godwit().watch(&name)?;
        watch.wait_for("progress", LIMIT, |line| line["sent_bytes"].as_u64() > Some(0))?;
        let status = machines.status(&name)?;
        ensure!(status["progress"]["sent_bytes"].as_u64() > Some(0), "{status}");
        ensure!(status["settings"]["downtime-limit"] == "5ms", "{status}");
        ensure!(status["settings"]["max-bandwidth"] == "20MiB/s", "{status}");

        // As programs do, by versions: of a microvm its own socket tells the same.
        let vm = machines.source().vm_name();
        let own = vm.strip_prefix("microvm:").map(PathBuf::from);
        let sockets: Vec<PathBuf> = std::iter::once(socket(&name)).chain(own).collect();
        let mut watchers = Vec::new();
        for socket in &sockets {
            let look = asked(socket, r#"{"command":"progress","version":1}"#)?.next();
            ensure!(look.context("no answer")?["version"] == 1);
            let look = asked(socket, r#"{"command":"progress"}"#)?.next();
            ensure!(look.context("no answer")?.get("version").is_none());
            let refused = asked(socket, r#"{"command":"cancel","version":2}"#)?.next();
            let refused = refused.context("no answer")?.to_string();
            ensure!(refused.contains("version 2 is not spoken here: name one of 1"), "{refused}");
            watchers.push(asked(socket, r#"{"command":"watch","version":1}"#)?);
        }

        // What is wrong changes nothing, nor does what stands beside it.
        machines
            .refused(&[&["set"], &of[..], &["speed=9"]].concat(), "there is no setting 'speed'")?;
        let two = [&["set"], &of[..], &["downtime-limit=1h", "patience=soon"]].concat();
        machines.refused(&two, "patience=soon is not possible: use a time")?;
        ensure!(machines.status(&name)?["settings"]["downtime-limit"] == "5ms");
        machines.refused(&["cancel", "--migration", "nobody"], "no migration 'nobody' runs")?;
        let nobody = ["status", "--watch", "--migration", "nobody"];
        machines.refused(&nobody, "no migration 'nobody' runs")?;

        machines.done(
            &[&["set"], &of[..], &["max-bandwidth=30MiB/s", "delay-hot-percent=0"]].concat(),
        )?;
        ensure!(machines.status(&name)?["settings"]["max-bandwidth"] == "30MiB/s");
        migrate.wait_for("the second round", LIMIT, |line| line["round"].as_u64() > Some(0))?;
        machines.refused(&[&["switchover"], &of[..]].concat(), "above the limit of 5ms")?;

        machines.done(&[&["switchover"], &of[..], &["--force"]].concat())?;
        let migrate = migrate.wait(LIMIT)?;
        machines.check_moved(&migrate)?;
        ensure!(receive.wait(LIMIT)?.status.success());
        let watch = watch.wait(LIMIT)?;
        ensure!(watch.status.success(), "{}: {}", watch.status, watch.errors);
        ensure!(watch.last()["event"] == "ended", "{}", watch.last());
        for watcher in watchers {
            let told: Vec<Value> = watcher.collect();
            let outcome = told.last().map(|line| line["outcome"].clone());
            ensure!(outcome == Some("migrated".into()), "{outcome:?}");
            ensure!(told[0]["answer"] == "watching", "{}", told[0]);
            ensure!(told.iter().any(|line| line["event"] == "progress"), "{told:?}");
        }
        // By name where another test has one that runs.
        machines.refused(&[&["set"], &of[..], &["patience=5s"]].concat(), "no migration ")?;
    }
    Ok(())
}

/// Bytes a second that are sent from now on, over `time`.
fn rate(migrate: &Running, time: Duration) -> anyhow::Result<f64> {
    let look = || {
        let lines = migrate.lines();
        let line = lines.last().context("no progress")?.clone();
        let number =
            |name: &str| line[name].as_f64().with_context(|| format!("no {name} in {line}"));
        Ok::<_, anyhow::Error>((number("sent_bytes")?, number("elapsed_ms")?))
    };
    let (sent_before, then) = look()?;
    std::thread::sleep(time);
    let (sent, now) = look()?;
    Ok((sent - sent_before) / (now - then) * 1e3)
}

#[test]
fn a_bandwidth_that_is_set_while_it_runs_is_kept_to() -> anyhow::Result<()> {
    // Mutation: `godwit set max-bandwidth` is taken, shown, and changes nothing.
    for machines in machines("a_bandwidth_that_is_set_while_it_runs_is_kept_to", Qemus::Newest) {
        let mut machines = machines?;
        let name = name("bandwidth");
        let (migrate, receive) = machines.start(&name, ENDLESS)?;
        let time = Duration::from_secs(2);
        let mut seen = Vec::new();
        for (limit, mib) in [("20MiB/s", 20.0), ("5MiB/s", 5.0), ("40MiB/s", 40.0)] {
            machines.done(&["set", "--migration", &name, &format!("max-bandwidth={limit}")])?;
            // What was let through under the old one passes first.
            std::thread::sleep(Duration::from_secs(1));
            seen.push((mib, rate(&migrate, time)? / f64::from(1 << 20)));
        }
        // A round that ends lets the link idle for a moment; the limit itself is never passed by
        // much.
        for (limit, rate) in &seen {
            ensure!(*rate > limit * 0.4 && *rate < limit * 1.3, "MiB/s set and sent: {seen:?}");
        }
        machines.done(&["cancel", "--migration", &name])?;
        ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
        receive.wait(LIMIT)?;
        machines.check_untouched()?;
    }
    Ok(())
}

#[test]
fn a_cpu_budget_that_is_set_while_it_runs_is_kept_to() -> anyhow::Result<()> {
    // Mutation: what channels have worked is not counted.
    let Some(build) = builds_for("a_cpu_budget_that_is_set_while_it_runs_is_kept_to").pop() else {
        return Ok(());
    };
    let mut pair = Pair::start(&VmConfig::new(&build, GuestConfig::small(Mode::Full)))?;
    let name = name("budget");
    let busy = ["--compression", "zstd:3", "--downtime-limit", "1ms", "--patience", "0s"];
    let options = [&busy[..], &["--throttle", "off", "--name", &name]].concat();
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
    await_copying(&migrate)?;
    // Of a processor, in two seconds.
    let used = || -> anyhow::Result<f64> {
        let look = || CpuTime::of(migrate.pid(), &[]);
        let (before, began) = (look()?, Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        Ok((look()? - before).others.as_secs_f64() / began.elapsed().as_secs_f64())
    };
    let free = used()?;
    pair.godwit.done(&["set", "--migration", &name, "cpu-budget=10%"])?;
    // What was begun without it ends first.
    std::thread::sleep(Duration::from_millis(500));
    let held = used()?;
    println!("of a processor: {free:.2}, with a budget of 0.1 {held:.2}");
    // The looks between rounds are not counted, and are few.
    ensure!(free > 0.3 && held < 0.2, "{free} {held}");
    let refused = pair.godwit.run(&["set", "--migration", &name, "cpu-budget=0"])?;
    let words = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && words.contains("use a whole number from 1"), "{words}");
    pair.godwit.done(&["cancel", "--migration", &name])?;
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
    receive.wait(LIMIT)?;
    check_untouched(&mut pair.source)
}

#[test]
fn a_switchover_is_forced_within_the_first_round() -> anyhow::Result<()> {
    for machines in machines("a_switchover_is_forced_within_the_first_round", Qemus::All) {
        let mut machines = machines?;
        let name = name("forced");
        let (migrate, receive) = machines.start(&name, &[ENDLESS, &["--verify"]].concat())?;
        machines.refused(&["switchover", "--migration", &name], "the downtime not known yet")?;
        machines.done(&["set", "--migration", &name, "max-bandwidth=off"])?;
        machines.done(&["switchover", "--migration", &name, "--force"])?;
        let migrate = migrate.wait(LIMIT)?;
        machines.check_moved(&migrate)?;
        ensure!(migrate.last()["verified"] == true);
        ensure!(receive.wait(LIMIT)?.status.success());
    }
    Ok(())
}

#[test]
fn a_migration_is_cancelled_from_outside() -> anyhow::Result<()> {
    for machines in machines("a_migration_is_cancelled_from_outside", Qemus::All) {
        let mut machines = machines?;
        let name = name("cancelled");
        let (migrate, _receive) = machines.start(&name, ENDLESS)?;
        machines.done(&["cancel", "--migration", &name])?;
        let migrate = migrate.wait(LIMIT)?;
        ensure!(migrate.status.code() == Some(130), "{}", migrate.status);
        machines.check_untouched()?;
    }
    Ok(())
}

#[test]
fn a_throttle_ends_with_the_godwit_that_held_it() -> anyhow::Result<()> {
    for machines in machines("a_throttle_ends_with_the_godwit_that_held_it", Qemus::All) {
        let mut machines = machines?;
        let options =
            ["--max-bandwidth", "20MiB/s", "--downtime-limit", "1ms", "--throttle", "direct"];
        let (mut migrate, _receive) = machines.start(&name("killed"), &options)?;
        migrate.wait_for("a throttle", LIMIT, |line| line["throttle"].as_f64() > Some(0.5))?;
        migrate.kill();
        machines.check_untouched()?;
    }
    Ok(())
}

#[test]
fn a_migration_that_takes_too_long_is_cancelled_or_forced() -> anyhow::Result<()> {
    let test = "a_migration_that_takes_too_long_is_cancelled_or_forced";
    for machines in machines(test, Qemus::Newest) {
        let mut machines = machines?;
        let late: &[&str] = &["--finish-by", "2s"];
        let (migrate, receive) = machines.start(&name("late"), &[ENDLESS, late].concat())?;
        let migrate = migrate.wait(LIMIT)?;
        ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
        let said = &migrate.errors;
        ensure!(said.contains("not ended within 2s (--finish-by): cancelled"), "{said}");
        receive.wait(LIMIT)?;
        machines.check_untouched()?;
    }
    for machines in machines(test, Qemus::Newest) {
        let mut machines = machines?;
        let late: &[&str] = &["--finish-by", "3s", "--on-timeout", "force"];
        let late = [ENDLESS, &["--switchover-bandwidth", "1GiB/s"], late].concat();
        let (migrate, receive) = machines.start(&name("late-forced"), &late)?;
        let migrate = migrate.wait(LIMIT)?;
        ensure!(migrate.errors.contains("switching over now"), "{}", migrate.errors);
        machines.check_moved(&migrate)?;
        ensure!(receive.wait(LIMIT)?.status.success());
    }
    Ok(())
}

#[test]
fn a_migration_that_takes_too_long_leaves_by_post_copy() -> anyhow::Result<()> {
    // Mutation: what the deadline asks for is not heard.
    let test = "a_migration_that_takes_too_long_leaves_by_post_copy";
    for machines in machines(test, Qemus::Newest) {
        let mut machines = machines?;
        let late = ["--finish-by", "6s", "--on-timeout", "postcopy", "--reconnect", "60s"];
        let (migrate, receive) = machines.start(&name("late-left"), &[ENDLESS, &late].concat())?;
        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        let said =
            "not ended within 6s (--finish-by): switching over now, and what is left follows";
        ensure!(migrate.errors.contains(said), "{}", migrate.errors);
        machines.check_moved(&migrate)?;
        ensure!(receive.status.success(), "{} {}", receive.last(), receive.errors);
        // Not before, and what was left did follow.
        let left = migrate.lines.iter().find(|line| line["stage"] == "post-copy");
        let at = left.and_then(|line| line["elapsed_ms"].as_f64());
        ensure!(at >= Some(6000.0), "it left after {at:?} ms");
        let missing = migrate.last()["post_copy"]["missing_bytes"].as_u64();
        ensure!(missing > Some(0), "{}", migrate.last());
    }
    Ok(())
}

#[test]
fn a_migration_works_on_the_processors_it_was_given() -> anyhow::Result<()> {
    let test = "a_migration_works_on_the_processors_it_was_given";
    let Some(build) = builds_for(test).pop() else { return Ok(()) };
    let pair = Pair::start(&VmConfig::new(&build, GuestConfig::small(Mode::Full)))?;
    let (given, before) = (["--cpus", "0", "--nice", "7"], processors(pair.source.pid())?);
    let (receive, address) = pair.godwit.receive(&pair.destination, &given)?;
    let options = [ENDLESS, &given].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
    await_copying(&migrate)?;
    for (pid, threads) in [(migrate.pid(), 5), (receive.pid(), 3)] {
        let found = processors(pid)?;
        ensure!(found.len() >= threads, "{found:?}");
        ensure!(found.iter().all(|thread| thread == &("0".to_owned(), 7)), "{found:?}");
    }
    ensure!(processors(pair.source.pid())? == before, "the VM has other processors than it had");
    Ok(())
}

#[test]
fn commands_are_run_around_the_switchover() -> anyhow::Result<()> {
    let Some(build) = builds_for("commands_are_run_around_the_switchover").pop() else {
        return Ok(());
    };
    // A name that a shell must not read, and cards of two kinds.
    let named = "web $(01),debug-threads=on";
    let cards = ["virtio-net-pci,mac=52:54:00:00:00:01", "rtl8139,mac=52:54:00:00:00:02"];
    let (name, macs) = ("web $(01)", "52:54:00:00:00:01,52:54:00:00:00:02");
    let extra = ["-name", named, "-device", cards[0], "-device", cards[1]];
    let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_extra(&extra);
    let mut pair = Pair::start(&config)?;
    let file = std::env::temp_dir().join(format!("godwit-e2e-hooks-{}", std::process::id()));
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    // What each was told, and what it may do.
    let told = || -> anyhow::Result<Vec<String>> {
        let text = std::fs::read_to_string(&file)?;
        std::fs::remove_file(&file)?;
        Ok(text.lines().map(words).collect())
    };
    let note = |more: &str| {
        let who = "$GODWIT_VM $GODWIT_NAME $GODWIT_MACS";
        let told = format!("$GODWIT_HOOK {who} $GODWIT_OUTCOME $(grep CapBnd /proc/self/status)");
        format!("echo \"{told}\" >> {}{more}", file.display())
    };
    let own = std::fs::read_to_string("/proc/self/status")?;
    let own = own.lines().find(|line| line.starts_with("CapBnd")).context("no rights")?;
    let who = format!("{} {name} {macs}", pair.source.vm_name());
    let line = |hook: &str, outcome: &str| words(&format!("{hook} {who} {outcome} {own}"));
    let hooks = |before: &'static str| {
        let [before, plain] = [note(before), note("")];
        [("before", before), ("at", plain.clone()), ("after", plain)]
            .map(|(hook, command)| format!("--hook-{hook}={command}"))
    };

    // The guest stays where the first of them fails; of the others only the last is run.
    let options = hooks("; exit 9");
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let (failed, _) = pair.migrate(&options)?;
    ensure!(failed.status.code() == Some(1), "{}", failed.errors);
    ensure!(failed.errors.contains("ended with exit status: 9"), "{}", failed.errors);
    check_untouched(&mut pair.source)?;
    let found = told()?;
    ensure!(found == [line("before", ""), line("after", "failed")], "{found:?}");

    pair.destination = TestVm::destination(&config)?;
    let options = hooks("; sleep 1");
    let options: Vec<&str> = options.iter().map(String::as_str).chain(["--verify"]).collect();
    let (migrate, _) = pair.migrate(&options)?;
    check_moved(&mut pair, &migrate)?;
    let found = told()?;
    let expected = [line("before", ""), line("at", ""), line("after", "migrated")];
    ensure!(found == expected, "{found:?}");
    Ok(())
}

/// Of each thread of a process: on which processors it may run, and its nice value.
fn processors(pid: i32) -> anyhow::Result<Vec<(String, i32)>> {
    let mut found = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let place = thread?.path();
        let (status, stat) = (place.join("status"), place.join("stat"));
        let (Ok(status), Ok(stat)) =
            (std::fs::read_to_string(status), std::fs::read_to_string(stat))
        else {
            // It has just ended.
            continue;
        };
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        // The name, the second field, may have spaces in it; "nice" is the 19th (proc(5)).
        let behind = stat.rsplit_once(") ").context("no name")?.1;
        let nice = behind.split(' ').nth(16).context("no nice value")?.parse()?;
        found.push((allowed.context("no processors")?.trim().to_owned(), nice));
    }
    Ok(found)
}
