//! `make faults-postcopy`: kills and cuts at random moments while the memory of guests follows, and
//! hosts that end.
//!
//! Keeps one promise: it ends red when a guest did not go on, or found damage.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Context;
use clap::{Parser, ValueEnum};
use fastrand::Rng;
use godwit_bench::report::{Better, Report, machine, with_table};
use godwit_faults::followed::{Counts, Fault, Kind, draw, run};
use godwit_faults::followed_microvms::{self, MACHINES};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, GuestConfig, VmConfig, builds_for, end_children_on_interrupt, kvm_builds_for, kvm_for,
};

/// Kills godwits, cuts links and loses sources while the memory of guests follows them.
#[derive(Debug, Parser)]
struct Arguments {
    /// Kills of a godwit while pages are missing
    #[arg(long, default_value_t = 100)]
    kills: u32,
    /// Cuts of the link, of one to thirty seconds, while pages are missing
    #[arg(long, default_value_t = 100)]
    cuts: u32,
    /// Sources that are lost while pages are missing, of guests with a copy of them
    #[arg(long, default_value_t = 100)]
    lost: u32,
    /// Guests of these machines alone [default: one kind after the other]
    #[arg(long, value_enum)]
    only: Option<Machines>,
    /// Guests at once
    #[arg(long, default_value_t = 4)]
    at_once: u64,
    /// Repeats what another run drew
    #[arg(long)]
    seed: Option<u64>,
}

/// Machines that guests move between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Machines {
    Qemu,
    Microvm,
}

/// Guests of one kind of machines.
enum Guests {
    Qemu(Vec<VmConfig>),
    Microvm,
}

impl Guests {
    /// Of `machines`, if these can be had here.
    fn of(machines: Machines) -> Option<Self> {
        match machines {
            Machines::Qemu => Some(configs()).filter(|it| !it.is_empty()).map(Self::Qemu),
            Machines::Microvm => kvm_for("followed").then_some(Self::Microvm),
        }
    }

    /// Has one move; which guest it is follows from the `number` of the move.
    fn run(&self, number: usize, faults: &[Fault], rng: &mut Rng) -> anyhow::Result<Counts> {
        match self {
            Self::Qemu(configs) => run(&configs[number % configs.len()], faults, rng),
            Self::Microvm => {
                let options = MACHINES[number % MACHINES.len()];
                followed_microvms::run(options, faults, rng)?.context("no KVM any more")
            }
        }
    }

    /// Where the page has their table.
    fn place(&self) -> [&'static str; 2] {
        match self {
            Self::Qemu(_) => [BEGIN, END],
            Self::Microvm => [MICROVM_BEGIN, MICROVM_END],
        }
    }

    /// So many kills, cuts and lost sources are worth a table.
    fn worth(&self) -> u32 {
        match self {
            Self::Qemu(_) => 100,
            Self::Microvm => 20,
        }
    }

    /// What has to be done where a command was killed.
    fn cure(&self) -> &'static str {
        match self {
            Self::Qemu(_) => "the same command again",
            Self::Microvm => "nothing",
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Qemu(_) => "QEMU",
            Self::Microvm => "microvms",
        }
    }
}

/// Faults of one move, at the most.
const FAULTS: usize = 4;

struct State {
    counts: Counts,
    problems: Vec<String>,
}

impl State {
    fn kills(&self) -> u32 {
        self.counts.kills.iter().sum()
    }
}

/// Guests of QEMU, whose memory follows from and into memory of QEMU's own, and a file.
fn configs() -> Vec<VmConfig> {
    let guest = |mode| GuestConfig::small(mode);
    let tcg = builds_for("followed")
        .into_iter()
        .flat_map(|build| [Mode::Rate, Mode::Full].map(|mode| VmConfig::new(&build, guest(mode))));
    let kvm = kvm_builds_for("followed").into_iter();
    let kvm = kvm.map(|build| VmConfig::new(&build, guest(Mode::Full)).on_kvm());
    let backends = [Backend::Anonymous, Backend::SharedFile];
    tcg.chain(kvm)
        .flat_map(|config| backends.map(|backend| config.clone().with_backend(backend)))
        .collect()
}

/// The page that has the table, and where.
const PAGE: &str = "docs/reliability.md";
const BEGIN: &str = "<!-- made by `make faults-postcopy`: begin -->\n";
const END: &str = "<!-- made by `make faults-postcopy`: end -->\n";
const MICROVM_BEGIN: &str = "<!-- made by `make faults-postcopy` with microvms: begin -->\n";
const MICROVM_END: &str = "<!-- made by `make faults-postcopy` with microvms: end -->\n";

/// What befell guests whose memory followed them, and what came of it.
fn table(counts: &Counts, killed: &str) -> String {
    let Counts { kills: [migrate, receive], cuts, lost, others, moves, stayed, compared, whole } =
        counts;
    let mut table =
        String::from("| while pages were missing | how often | what has to be done |\n");
    table += "| --- | ---: | --- |\n";
    for (what, count, cure) in [
        ("`godwit migrate` was killed", migrate, killed),
        ("`godwit receive` was killed", receive, killed),
        ("the link was cut, for 1 to 30 s", cuts, "nothing"),
        ("the source was lost, with a copy in a third place", lost, "nothing"),
    ] {
        table += &format!("| {what} | {count} | {cure} |\n");
    }
    table
        + &format!(
            "\nBefore or behind that struck {others}. {moves} guests moved, {stayed} stayed, none \
             was lost or damaged;\n{compared} pages that came behind their guest were as they had \
             been at the source: all that {whole} guests\nlacked whose source had its memory in a \
             file.\n"
        )
}

fn moves(
    arguments: &Arguments,
    guests: &Guests,
    (state, next): (&Mutex<State>, &AtomicU64),
    (seed, interrupted): (u64, &AtomicBool),
) {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let (had, failed) = {
            let state = state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let had = [state.kills(), state.counts.cuts, state.counts.lost];
            (had, !state.problems.is_empty())
        };
        let wanted = [arguments.kills, arguments.cuts, arguments.lost];
        let kinds = [Kind::Kill, Kind::Cut, Kind::Lose].into_iter().zip(had.iter().zip(wanted));
        let kinds: Vec<Kind> =
            kinds.filter(|(_, (had, wanted))| *had < wanted).map(|(kind, _)| kind).collect();
        if interrupted.load(Ordering::Relaxed) || kinds.is_empty() || failed {
            return;
        }
        let mut rng = Rng::with_seed(seed.wrapping_mul(1000).wrapping_add(number));
        let faults: Vec<_> = (0..rng.usize(1..=FAULTS))
            .map(|_| {
                let kind = kinds[rng.usize(..kinds.len())];
                draw(kind, &mut rng)
            })
            .collect();
        let outcome = guests.run(number as usize, &faults, &mut rng);
        if interrupted.load(Ordering::Relaxed) {
            return;
        }
        let mut state = state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match outcome {
            Ok(counts) => state.counts.add(counts),
            Err(problem) => {
                let told = format!("move {number} of seed {seed}, {faults:?}: {problem:#}");
                println!("RED {told}");
                state.problems.push(told);
            }
        }
        let Counts { moves, stayed, cuts, lost, kills: [source, destination], .. } = state.counts;
        let Counts { others, compared, whole, .. } = state.counts;
        println!(
            "{moves} moved, {stayed} stayed; struck: migrate killed {source}, receive killed \
             {destination}, link cut {cuts}, source lost {lost}; before or behind {others}; \
             {compared} pages compared, all that {whole} of them lacked"
        );
    }
}

/// Moves guests until there were as many faults of each kind as are wanted; whether all was well.
fn strike(
    arguments: &Arguments,
    guests: &Guests,
    (seed, interrupted): (u64, &AtomicBool),
    report: &mut Report,
) -> anyhow::Result<bool> {
    let state = Mutex::new(State { counts: Counts::default(), problems: Vec::new() });
    let next = AtomicU64::new(0);
    println!("guests of {}", guests.name());
    std::thread::scope(|scope| {
        for _ in 0..arguments.at_once.max(1) {
            scope.spawn(|| moves(arguments, guests, (&state, &next), (seed, interrupted)));
        }
    });
    let state = state.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if interrupted.load(Ordering::Relaxed) {
        return Ok(false);
    }
    let of = |what: &str| format!("{what}, {}", guests.name());
    report.figure(&of("moved"), state.counts.moves);
    report.figure(&of("stayed"), state.counts.stayed);
    report.figure(&of("problems"), state.problems.clone());
    for (what, had, wanted) in [
        ("kills", state.kills(), arguments.kills),
        ("cuts", state.counts.cuts, arguments.cuts),
        ("lost", state.counts.lost, arguments.lost),
    ] {
        report.target(of(what), f64::from(had), f64::from(wanted), Better::Higher);
    }
    // Each move was to have all of them compared, where the source's memory is in a file: that of
    // half of all QEMUs. At least one lacks something.
    report.figure(&of("pages compared with the source's"), state.counts.compared);
    let whole = f64::from(state.counts.whole);
    report.target(of("guests of which all pages were compared"), whole, 1.0, Better::Higher);
    let red = state.problems.len() as f64;
    report.target(of("guests that did not go on"), red, 0.0, Better::Lower);
    let wanted = [arguments.kills, arguments.cuts, arguments.lost];
    if state.problems.is_empty() && wanted.iter().all(|it| *it >= guests.worth()) {
        let page = std::fs::read_to_string(PAGE).with_context(|| format!("cannot read {PAGE}"))?;
        let (table, [begin, end]) = (table(&state.counts, guests.cure()), guests.place());
        std::fs::write(PAGE, with_table(&page, begin, end, &table)?)?;
        println!("table written to {PAGE}");
    }
    Ok(state.problems.is_empty())
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    let interrupted = end_children_on_interrupt().context("no signals")?;
    let seed = arguments.seed.unwrap_or_else(|| Rng::new().u64(..1 << 20));
    let kinds = [Machines::Qemu, Machines::Microvm];
    let wanted = kinds.into_iter().filter(|kind| arguments.only.is_none_or(|only| only == *kind));
    let all: Vec<Guests> = wanted.filter_map(Guests::of).collect();
    anyhow::ensure!(!all.is_empty(), "there are no such machines here: run `make qemu`");
    println!("{}; seed {seed}", machine());
    let mut report = Report::new("followed");
    report.figure("seed", seed);
    let mut well = true;
    for guests in &all {
        well &= strike(&arguments, guests, (seed, &interrupted), &mut report)?;
        if interrupted.load(Ordering::Relaxed) {
            println!("ended by a signal; all VMs are ended");
            return Ok(ExitCode::from(130));
        }
    }
    report.finish()?;
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
