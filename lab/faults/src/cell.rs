//! One fault at one step: from two VMs to the verdict.
//!
//! Keeps two promises. A step that is not reached is a fault that did not strike, and is told as
//! such, never as passed. And where nobody runs the guest, only what `docs/recovery.md` has an
//! operator type is done.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use fastrand::Rng;
use godwit_e2e::recover_knows;
use godwit_testbed::{Harm, MemoryGroup, Proxy, Running};
use rustix::process::Signal;
use serde_json::Value;

use crate::phase::{Phase, watch_behind};
use crate::point::{Must, Point};
use crate::rig::{Rig, Side, State};
use crate::scene::Scene;

/// Longer than any limit of the product, of which the longest is 120 s.
const LIMIT: Duration = Duration::from_secs(200);
/// From the end of everything to a guest that runs by itself.
const BACK: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(5);

/// What came of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// The guest stayed at the source.
    Stayed,
    /// It moved.
    Moved,
    /// It went with its VM.
    Lost,
}

impl Came {
    /// Its name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stayed => "stayed",
            Self::Moved => "moved",
            Self::Lost => "lost with its VM",
        }
    }
}

/// When a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// At this step.
    pub phase: Phase,
    /// So many bytes behind its beginning.
    pub bytes: usize,
    /// So long behind that, while all goes on.
    pub delay: Duration,
}

impl Moment {
    /// Where `phase` begins.
    #[must_use]
    pub fn at(phase: Phase) -> Self {
        Self { phase, bytes: 0, delay: Duration::ZERO }
    }

    /// Somewhere in `phase` or behind it: within a message, within a round, or as a process gets
    /// to it. Behind the rounds there is little left to be within.
    #[must_use]
    pub fn random(phase: Phase, rng: &mut Rng) -> Self {
        let round = if phase < Phase::Prepare { 8 << 20 } else { 512 };
        let bytes = [64, 4096, round][rng.usize(..3)];
        let micros = [1, 2000, 30_000][rng.usize(..3)];
        let delay = Duration::from_micros(rng.u64(..micros));
        Self { phase, bytes: rng.usize(..bytes), delay }
    }

    fn is_exact(self) -> bool {
        self == Self::at(self.phase)
    }
}

/// A fault that was survived.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Whether it struck: at a random moment it may all be over.
    pub struck: bool,
    /// What came of it.
    pub came: Came,
    /// What an operator had to type.
    pub typed: Vec<String>,
}

/// Has `point` strike a migration between the VMs of `rig` at `moment`, and checks what is left
/// behind. When the guest was lost with its VM, or what is not as it should be was found, the
/// rig is of no more use.
///
/// # Errors
/// What is not as it should be.
pub fn run(
    rig: &mut dyn Rig,
    point: &Point,
    moment: Moment,
    rng: &mut Rng,
) -> anyhow::Result<Verdict> {
    rig.renew()?;
    let (receive, address) = receive(rig, &[])?;
    let proxy = Proxy::to(&address)?;
    proxy.hold_where(watch_behind(moment.phase, moment.bytes));
    let source = rig.vm(Side::Source);
    let own = rig.migrate_options();
    let options: Vec<&str> =
        own.iter().map(String::as_str).chain(point.options.iter().copied()).collect();
    let migrate = rig.godwit().migrate_named(&source, proxy.address(), &options)?;
    let mut pair = [migrate, receive];
    // They go when nobody is left in them.
    let mut groups = Vec::new();
    let told = strike(rig, point, moment, rng, (&proxy, &mut groups), &mut pair);
    let told = told.and_then(|struck| settle(rig, point, moment, struck, &mut pair));
    let [migrate, receive] = &pair;
    told.with_context(|| {
        let last = |godwit: &Running| godwit.lines().last().cloned().unwrap_or_default();
        let [said, heard] = [migrate, receive].map(|godwit| godwit.errors().trim().to_owned());
        let vms = [Side::Source, Side::Destination].map(|side| rig.complaints(side));
        format!(
            "migrate: {} {said}; receive: {} {heard}; the VMs: {vms:?}",
            last(migrate),
            last(receive)
        )
    })
}

/// Has the fault strike; whether it could, for it may be over by then.
fn strike(
    rig: &mut dyn Rig,
    point: &Point,
    moment: Moment,
    rng: &mut Rng,
    (proxy, groups): (&Proxy, &mut Vec<MemoryGroup>),
    [migrate, receive]: &mut [Running; 2],
) -> anyhow::Result<bool> {
    let reached = proxy.await_hold(LIMIT, || migrate.has_ended() && receive.has_ended());
    if moment.is_exact() {
        ensure!(reached, "the migration never came to '{}'", moment.phase);
    }
    if moment.delay > Duration::ZERO {
        proxy.release(Harm::None);
        std::thread::sleep(moment.delay);
        proxy.hold();
    }
    if !reached || migrate.has_ended() || receive.has_ended() {
        proxy.release(Harm::None);
        return Ok(false);
    }
    (point.strike)(&mut Scene { rig, proxy, migrate, receive, groups, rng })?;
    Ok(true)
}

/// Waits until both have ended and it is clear who has the guest, and checks that all is as it must
/// be.
fn settle(
    rig: &mut dyn Rig,
    point: &Point,
    moment: Moment,
    struck: bool,
    pair: &mut [Running; 2],
) -> anyhow::Result<Verdict> {
    let (mut typed, since) = (Vec::new(), Instant::now());
    await_ended(rig, &pair[0], "migrate")?;
    let limit = point.within.filter(|_| moment.is_exact() && moment.phase < Phase::Commit);
    if let Some(limit) = limit {
        let took = since.elapsed();
        ensure!(took < limit, "migrate ended after {took:?}, where both sides were there");
    }
    let owner = match find(rig)? {
        Some(owner) => Some(owner),
        None => by_hand(rig, &mut pair[1], &mut typed)?,
    };
    let said = pair[0].lines().last().map(|last| last["guest"].clone()).unwrap_or_default();
    let came = match owner {
        Some(Side::Source) => {
            ensure!(said != "destination", "migrate says that the guest is at the destination");
            end(&mut pair[1], &mut typed)?;
            // What nobody was left to clean up goes with the next migration.
            if !point.leaves {
                rig.check_stayed()?;
                rig.await_alone(Side::Destination)?;
            }
            Came::Stayed
        }
        Some(Side::Destination) => {
            ensure!(said != "source", "migrate says that the guest is at the source");
            end(&mut pair[1], &mut typed)?;
            release_source(rig, &mut typed)?;
            if !point.leaves {
                rig.check_arrived()?;
                rig.await_alone(Side::Source)?;
            }
            Came::Moved
        }
        None => Came::Lost,
    };
    if struck {
        check(point.must, moment, came)?;
        check_by_itself(point, moment, came, &typed)?;
    }
    if came == Came::Lost {
        return Ok(Verdict { struck, came, typed });
    }
    if came == Came::Moved {
        rig.turn()?;
    }
    second_attempt(rig).context("the second attempt")?;
    Ok(Verdict { struck, came, typed })
}

/// Looks whether what came of it may. At a moment that is not exactly the beginning of a step it is
/// not known whether COMMIT was sent.
fn check(must: Must, moment: Moment, came: Came) -> anyhow::Result<()> {
    let phase = moment.phase;
    let before_commit = moment.is_exact() && phase < Phase::Commit;
    let copies = (Phase::FirstRound..Phase::LastRound).contains(&phase);
    let may = match must {
        Must::Move => came == Came::Moved,
        Must::Stay => came == Came::Stayed,
        Must::MoveBeforeStop if moment.is_exact() && copies => came == Came::Moved,
        Must::StayBeforeCommit if before_commit => came == Came::Stayed,
        // One that has arrived whole may run on; the last of it may be on its way.
        Must::GoWithItsVm(Side::Source) if before_commit && phase < Phase::State => {
            came == Came::Lost
        }
        Must::GoWithItsVm(Side::Source) => came != Came::Stayed,
        Must::GoWithItsVm(Side::Destination) if before_commit => came == Came::Stayed,
        Must::GoWithItsVm(Side::Destination) => true,
        _ => came != Came::Lost,
    };
    ensure!(may, "the guest {}, where the fault must {must:?}", came.name());
    Ok(())
}

/// Faults with which READY may come and COMMIT go nowhere: `receive` is killed, or the VM at the
/// destination, or the link is dead and the source is not told.
const TAKE_THE_DESTINATION: [u32; 4] = [2, 3, 21, 42];

/// Before COMMIT the guest runs on at the source without anything typed there, unless nobody was
/// left who could have it run. When the destination dies with READY on its way, the guest is
/// committed to what is gone, which only an operator can know.
fn check_by_itself(
    point: &Point,
    moment: Moment,
    came: Came,
    typed: &[String],
) -> anyhow::Result<()> {
    let destination_died = TAKE_THE_DESTINATION.contains(&point.number);
    let last = if destination_died { Phase::State } else { Phase::Ready };
    let must = moment.is_exact() && moment.phase <= last && !point.leaves;
    let at_source = typed.iter().any(|word| word.starts_with("source:"));
    let by_hand = must && came == Came::Stayed && at_source;
    ensure!(!by_hand, "the guest stood at the source until somebody typed {typed:?}");
    Ok(())
}

fn await_ended(rig: &mut dyn Rig, godwit: &Running, name: &str) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    while !godwit.has_ended() {
        ensure!(Instant::now() < until, "{name} does not end within {LIMIT:?}");
        both(rig)?;
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// What both VMs do, which is not to run the guest twice.
fn both(rig: &mut dyn Rig) -> anyhow::Result<[State; 2]> {
    // In this order: between two looks the guest may leave the source for the destination, never
    // the other way.
    let destination = rig.state(Side::Destination);
    let states = [rig.state(Side::Source), destination];
    ensure!(states != [State::Runs; 2], "BOTH SIDES RUN THE GUEST");
    Ok(states)
}

/// Who runs the guest by itself; `None` if nobody comes to.
fn find(rig: &mut dyn Rig) -> anyhow::Result<Option<Side>> {
    let until = Instant::now() + BACK;
    while Instant::now() < until {
        match both(rig)? {
            [State::Runs, _] => return Ok(Some(Side::Source)),
            [_, State::Runs] => return Ok(Some(Side::Destination)),
            _ => std::thread::sleep(LOOK),
        }
    }
    Ok(None)
}

/// Ends a `receive` that waits for a source that has gone, as an operator would who knows.
fn end(receive: &mut Running, typed: &mut Vec<String>) -> anyhow::Result<()> {
    let until = Instant::now() + BACK;
    while !receive.has_ended() && Instant::now() < until {
        std::thread::sleep(LOOK);
    }
    if !receive.has_ended() {
        typed.push("destination: Ctrl-C".to_owned());
        receive.signal(Signal::INT)?;
        let until = Instant::now() + BACK * 5;
        while !receive.has_ended() {
            ensure!(Instant::now() < until, "receive does not end when it is interrupted");
            std::thread::sleep(LOOK);
        }
    }
    Ok(())
}

/// Waits until the guardians have done what they can. Their records stay where it is in doubt.
fn await_guardians(rig: &dyn Rig) -> anyhow::Result<()> {
    let until = Instant::now() + BACK * 5;
    for side in [Side::Source, Side::Destination] {
        while rig.guardian(side)?.is_some() {
            ensure!(Instant::now() < until, "a guardian stays at the {side}");
            std::thread::sleep(LOOK);
        }
    }
    Ok(())
}

/// What `godwit recover` knows of a VM. One that keeps no record says by itself what it does.
fn known(rig: &mut dyn Rig, side: Side) -> anyhow::Result<String> {
    if rig.keeps_no_record() {
        let word = match rig.state(side) {
            State::Runs => "runs",
            State::Stands => "in-doubt",
            State::Waits => "never-came",
            State::Gone => "gone",
        };
        return Ok(word.to_owned());
    }
    match recover_knows(rig.godwit(), &rig.vm(side)) {
        // A domain that never was, or has ended, is nobody's to tell of.
        Err(_) if rig.state(side) == State::Gone => Ok("gone".to_owned()),
        knows => knows.map(|(known, _)| known),
    }
}

fn recover(rig: &dyn Rig, side: Side, guest: &str, typed: &mut Vec<String>) -> anyhow::Result<()> {
    if rig.keeps_no_record() {
        let command: &[&str] = if guest == "here" { &["resume", "--force"] } else { &["quit"] };
        typed.push(format!("{side}: godwit microvm {}", command.join(" ")));
        let vm = rig.vm(side);
        let socket = vm.trim_start_matches("microvm:");
        return rig.godwit().done(&[&["microvm"], command, &[socket]].concat()).map(drop);
    }
    typed.push(format!("{side}: godwit recover --guest {guest}"));
    rig.godwit().done(&["recover", "--vm", &rig.vm(side), "--guest", guest]).map(drop)
}

/// Does what docs/recovery.md says; returns who has the guest then.
fn by_hand(
    rig: &mut dyn Rig,
    receive: &mut Running,
    typed: &mut Vec<String>,
) -> anyhow::Result<Option<Side>> {
    end(receive, typed)?;
    await_guardians(rig)?;
    // One that waited for its source may have run the guest all the while.
    if let Some(owner) = find(rig)? {
        return Ok(Some(owner));
    }
    let [here, there] = [known(rig, Side::Source)?, known(rig, Side::Destination)?];
    match (here.as_str(), there.as_str()) {
        // The source's is gone, and the guest with it, if it never came.
        ("gone", "gone" | "never-came") => return Ok(None),
        (_, "handed-over") => {
            recover(rig, Side::Destination, "here", typed)?;
            if here != "gone" {
                recover(rig, Side::Source, "there", typed)?;
            }
        }
        (_, "runs") => recover(rig, Side::Source, "there", typed)?,
        (_, "never-came") => {
            recover(rig, Side::Destination, "there", typed)?;
            recover(rig, Side::Source, "here", typed)?;
        }
        (_, "gone") | ("stopped", _) => recover(rig, Side::Source, "here", typed)?,
        _ => bail!("nobody knows: the source says '{here}', the destination '{there}'"),
    }
    let owner = find(rig)?;
    ensure!(owner.is_some(), "settled by {typed:?}, and nobody runs the guest");
    Ok(owner)
}

/// The guest has left: so must its QEMU, if need be by an operator's word.
fn release_source(rig: &mut dyn Rig, typed: &mut Vec<String>) -> anyhow::Result<()> {
    let until = Instant::now() + BACK;
    while rig.state(Side::Source) != State::Gone && Instant::now() < until {
        std::thread::sleep(LOOK);
    }
    if rig.state(Side::Source) != State::Gone {
        await_guardians(rig)?;
        recover(rig, Side::Source, "there", typed)?;
    }
    Ok(())
}

/// Starts `godwit receive` for the guest of `rig`, with `more` options.
fn receive(rig: &dyn Rig, more: &[&str]) -> anyhow::Result<(Running, String)> {
    let options = rig.receive_options();
    let all: Vec<&str> = options.iter().map(String::as_str).chain(more.iter().copied()).collect();
    rig.godwit().receive_named(&rig.receiver(), &all)
}

/// Moves the guest once more, with digests compared, and has it stay there.
fn second_attempt(rig: &mut dyn Rig) -> anyhow::Result<()> {
    move_verified(rig, &["--verify"], &[]).map(drop)
}

/// Moves the guest with `options` of `godwit migrate`, of which one is `--verify`, and some of
/// `godwit receive`; checks that it arrived unharmed with its digests equal, and has it stay there;
/// what `migrate` told at its end.
///
/// # Errors
/// What is not as it should be.
pub fn move_verified(
    rig: &mut dyn Rig,
    options: &[&str],
    receives: &[&str],
) -> anyhow::Result<Value> {
    rig.renew()?;
    let (receive, address) = receive(rig, receives)?;
    let own = rig.migrate_options();
    let all: Vec<&str> = options.iter().copied().chain(own.iter().map(String::as_str)).collect();
    let migrate = rig.godwit().migrate_named(&rig.vm(Side::Source), &address, &all)?;
    // Its last word says where it stands if it does not end.
    let until = Instant::now() + LIMIT;
    while !migrate.has_ended() {
        let last = migrate.lines().last().cloned().unwrap_or_default();
        ensure!(Instant::now() < until, "migrate does not end within {LIMIT:?}: {last}");
        std::thread::sleep(LOOK);
    }
    let migrate = migrate.wait(LIMIT)?;
    if migrate.last()["outcome"] != "migrated" {
        // It may wait for another source.
        let said = receive.errors();
        bail!("{} {} {}", migrate.last(), migrate.errors.trim(), said.trim());
    }
    let receive = receive.wait(LIMIT)?;
    let told = || format!("{} {} {}", migrate.last(), migrate.errors, receive.errors);
    ensure!(migrate.last()["verified"] == true && receive.status.success(), "{}", told());
    rig.check_arrived()?;
    rig.await_alone(Side::Source)?;
    rig.turn()?;
    Ok(migrate.last().clone())
}
