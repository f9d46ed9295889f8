//! One move of a cell by one of the contestants, and its figures.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use godwit_bench::fixture::{Fixture, Moved, Outcome, Settled};
use godwit_bench::godwit::{Attempt, Over, Terms};
use godwit_testbed::{
    EmulatedLink, Godwit, OwnTerms, ProgressTrace, QemuBuild, TestVm, own_migration_under,
};
use serde_json::{Value, json};

use crate::cells::Cell;
use crate::contestants::Contestant;
use crate::rows::{Fate, Figure};

/// The guest's own speed is that over this time before the move.
const BEFORE: Duration = Duration::from_secs(2);
/// It is looked at for so long after the move: first touches of its memory are slow.
const AFTER: Duration = Duration::from_secs(5);
/// After so many heartbeats it has settled.
const SETTLED: usize = 5;
/// To start and to fill a guest takes no longer; nor do commands beyond the deadline.
const LIMIT: Duration = Duration::from_secs(120);
const MIB: f64 = 1_048_576.0;

/// What there is to move guests with.
#[derive(Clone, Copy)]
pub(crate) struct Tools<'a> {
    pub(crate) build: &'a QemuBuild,
    pub(crate) godwit: &'a Godwit,
    pub(crate) link: &'a EmulatedLink,
    /// A move is given up then.
    pub(crate) deadline: Duration,
}

/// What came of a move.
pub(crate) struct Result {
    pub(crate) fate: Fate,
    pub(crate) why: Option<String>,
    pub(crate) figures: BTreeMap<Figure, f64>,
    pub(crate) bugs: usize,
    pub(crate) own_words: Value,
}

impl Result {
    /// Of one that failed.
    pub(crate) fn failed(problem: &anyhow::Error) -> Self {
        let why = format!("{problem:#}").replace('\n', " ");
        let (figures, own_words) = (BTreeMap::new(), Value::Null);
        Self { fate: Fate::Failed, why: Some(why), figures, bugs: 0, own_words }
    }
}

/// What is seen of a move beside the guest.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// From the stop of the guest to its start, by the events of both QEMUs.
    switchover: Option<Duration>,
    wire: f64,
    emulator: Duration,
}

/// Starts the guest of `cell`, and has `contestant` move it.
pub(crate) fn one_move(
    cell: &Cell,
    contestant: Contestant,
    tools: Tools<'_>,
) -> anyhow::Result<Result> {
    let [source, destination] = cell.machines(tools.build, tools.link, contestant)?;
    let mut fixture = Fixture {
        destination,
        settled: Settled::Beats(SETTLED),
        lead: BEFORE,
        tail: AFTER,
        ..Fixture::new(source, LIMIT + tools.deadline)
    };
    let mut seen = Seen::default();
    let outcome = fixture.one_move(|source, destination| {
        let before = (tools.link.carried()?, tools.link.cpu_time()?);
        let (moved, switchover) = match contestant.style() {
            Some(style) => {
                let host = tools.link.far().address().to_string();
                let terms = OwnTerms { host: &host, bandwidth: None, patience: tools.deadline };
                let own = own_migration_under(terms, source, destination, style)?;
                (Moved::by_qemu(&own), own.switchover)
            }
            None => by_godwit(contestant, tools, source, destination)?,
        };
        let after = (tools.link.carried()?, tools.link.cpu_time()?);
        seen = Seen {
            switchover,
            wire: (after.0.0 - before.0.0) as f64,
            emulator: after.1.saturating_sub(before.1),
        };
        Ok(moved)
    })?;
    Ok(figures(&outcome, seen, tools.deadline))
}

fn by_godwit(
    contestant: Contestant,
    tools: Tools<'_>,
    source: &mut TestVm,
    destination: &mut TestVm,
) -> anyhow::Result<(Moved, Option<Duration>)> {
    source.qmp().forget_events();
    let terms = Terms {
        link: Over::Emulated(tools.link),
        patience: Some(tools.deadline),
        limit: LIMIT + tools.deadline,
    };
    let options = contestant.options();
    let attempt = Attempt::under(terms, tools.godwit, source, destination, options)?;
    let words = json!({
        "migrate": attempt.migrate.last(),
        "receive": attempt.receive.as_ref().map(|it| it.last()),
    });
    let mut moved = Moved::by_godwit(&attempt, words);
    if !moved.finished {
        // It was interrupted, or it failed by itself.
        let late = attempt.whole >= tools.deadline;
        let said = attempt.migrate.errors.trim();
        anyhow::ensure!(late, "godwit migrate: {} {said}", attempt.migrate.last()["error"]);
        return Ok((moved, None));
    }
    if contestant.is_post_copy() {
        // Its memory was there when the command was over.
        moved.wall = attempt.whole;
    }
    let stopped = source.qmp().wait_event("STOP", LIMIT).context("the guest did not stop")?;
    let resumed = attempt.began + attempt.wall;
    Ok((moved, resumed.checked_sub(stopped.emitted)))
}

fn figures(outcome: &Outcome, beside: Seen, deadline: Duration) -> Result {
    let Outcome { moved, seen, cpu, vcpus, began, .. } = outcome;
    let mut figures = BTreeMap::new();
    let mut enter = |figure, value: Option<f64>| {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            figures.insert(figure, value);
        }
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    enter(Figure::Total, Some(ms(moved.wall)));
    enter(Figure::Downtime, seen.switchover.map(|gap| ms(gap.length)));
    enter(Figure::DowntimeResolution, seen.switchover.map(|gap| ms(gap.resolution)));
    enter(Figure::Events, beside.switchover.map(ms));
    enter(Figure::Stall, seen.stall.map(|gap| ms(gap.length)));
    enter(Figure::Wire, Some(beside.wire / MIB));
    enter(Figure::Told, Some(moved.sent / MIB));
    let of_qemus: Duration = cpu.iter().sum();
    enter(Figure::Cpu, Some((of_qemus + moved.godwit_cpu).as_secs_f64()));
    enter(Figure::CpuGodwit, Some(moved.godwit_cpu.as_secs_f64()));
    enter(Figure::Vcpus, Some(vcpus.iter().sum::<Duration>().as_secs_f64()));
    enter(Figure::Emulator, Some(beside.emulator.as_secs_f64()));
    enter(Figure::Passes, Some(moved.rounds as f64));
    if let (Some(trace), Some(gap)) = (&outcome.trace, seen.switchover) {
        let end = (*began + moved.wall).max(gap.end) + AFTER;
        let parts = [*began, gap.end.saturating_sub(gap.length).max(*began), gap.end, end];
        let lost = losses(trace, parts, outcome.rate_before(BEFORE));
        enter(Figure::LostBefore, Some(lost[0]));
        enter(Figure::LostDuring, Some(lost[1]));
        enter(Figure::LostAfter, Some(lost[2]));
        enter(Figure::Lost, Some(lost.iter().sum()));
    }
    let late = !moved.finished;
    Result {
        fate: if late { Fate::Late } else { Fate::Moved },
        why: late.then(|| format!("not done within {} s", deadline.as_secs())),
        figures,
        bugs: outcome.bugs,
        own_words: moved.own_words.clone(),
    }
}

/// The work lost between each two of `parts`, the first of which is the beginning of the move, in
/// seconds of the guest's work before. Where it did more than before the loss is negative: cut off
/// at zero, chance would look like a loss.
fn losses(trace: &ProgressTrace, parts: [Duration; 4], before: f64) -> [f64; 3] {
    [0, 1, 2].map(|at| {
        let time = parts[at + 1].saturating_sub(parts[at]);
        time.as_secs_f64() * (1.0 - trace.rate(parts[at], parts[at + 1]) / before.max(1e-9))
    })
}
