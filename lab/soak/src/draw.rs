//! The settings of one move, from a seed.
//!
//! Keeps one promise: the same seed, VM and number of a move give the same settings and the same
//! fault, whatever was moved before and whatever other VMs do.

use fastrand::Rng;
use godwit_faults::cell::Moment;
use godwit_faults::phase::Phase;
use godwit_faults::point::{Must, Point, points};
use godwit_faults::report::phase_named;
use godwit_faults::rig::Adapter;

use crate::machine::Machine;

const CHANNELS: &[&str] = &["auto", "1", "2", "4"];
const COMPRESSION: &[&str] = &["auto", "none", "lz4", "zstd"];
const VERIFY: &[&str] = &["--verify", "--verify=stopped"];
const THROTTLE: &[&str] = &["adaptive", "off", "direct", "staged", "auto-converge"];
const BANDWIDTH: &[&str] = &["off", "64MiB/s", "128MiB/s", "2Gbit"];
const FINGERPRINTS: &[&str] = &["on", "off"];
const DOWNTIME: &[&str] = &["300ms", "1s", "3s"];
const GRANULARITY: &[&str] = &["auto", "4KiB", "64KiB", "1MiB"];

/// One fault of docs/reliability.md, perhaps at one step of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OneFault {
    number: u32,
    phase: Option<Phase>,
}

/// Which faults strike, and how often.
pub struct Strikes {
    /// All faults.
    pub points: Vec<Point>,
    /// Of a hundred moves, how many are struck.
    share: u8,
    only: Option<OneFault>,
}

impl Strikes {
    /// Of a hundred moves, `share` are struck by one of all faults.
    #[must_use]
    pub fn some(share: u8) -> Self {
        Self { points: points(), share, only: None }
    }

    /// Every move is struck by `only` this one.
    #[must_use]
    pub fn every(only: OneFault) -> Self {
        Self { points: points(), share: 100, only: Some(only) }
    }

    /// The option that asks for it, behind a blank; nothing where no fault strikes.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self { only: Some(OneFault { number, phase: Some(phase) }), .. } => {
                format!(" --fault {number}@{phase}")
            }
            Self { only: Some(OneFault { number, phase: None }), .. } => {
                format!(" --fault {number}")
            }
            Self { share: 0, .. } => String::new(),
            Self { share, .. } => format!(" --faults {share}"),
        }
    }
}

/// Reads `11`, or `11@state`.
///
/// # Errors
/// What is wrong with it, where no guest could survive it too.
pub fn one_fault(text: &str) -> Result<OneFault, String> {
    let (number, phase) = text.split_once('@').map_or((text, None), |(it, at)| (it, Some(at)));
    let phase = phase.map(phase_named).transpose()?;
    let named: Option<u32> = number.parse().ok();
    let point = points().into_iter().find(|point| Some(point.number) == named);
    let point = point.ok_or("it must be the number of a fault in docs/reliability.md")?;
    if !is_survived(&point) {
        return Err(format!("fault {number} takes the guest with it"));
    }
    match phase.filter(|phase| !point.phases.contains(phase)) {
        Some(phase) => Err(format!("fault {number} does not strike at {phase}")),
        None => Ok(OneFault { number: point.number, phase }),
    }
}

/// Whether it leaves a guest.
fn is_survived(point: &Point) -> bool {
    !matches!(point.must, Must::GoWithItsVm(_))
}

/// What strikes a move.
#[derive(Clone, Debug)]
pub struct Strike {
    /// Which of the list of faults.
    pub point: usize,
    /// When.
    pub moment: Moment,
    /// What is left to chance in it.
    pub seed: u64,
}

/// How one move is made.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// Options of `godwit migrate`.
    pub options: Vec<&'static str>,
    /// The fault that strikes it. Its options are the fault's own then.
    pub strike: Option<Strike>,
}

impl Drawn {
    /// Takes `own` options, each with its value, in the place of those that were drawn.
    pub fn replace(&mut self, own: &[&'static str]) {
        let mut drawn = std::mem::take(&mut self.options).into_iter();
        while let Some(option) = drawn.next() {
            let value = (!option.starts_with(VERIFY[0])).then(|| drawn.next()).flatten();
            if !own.contains(&option) {
                self.options.push(option);
                self.options.extend(value);
            }
        }
        self.options.extend(own);
    }
}

/// Draws the move with the number `number` of `machine`, and what of `strikes` strikes it that this
/// VM can survive.
#[must_use]
pub fn draw(seed: u64, machine: &Machine, number: u64, strikes: &Strikes) -> Drawn {
    // Two rounds, so that neighbours have nothing in common.
    let mut rng = Rng::with_seed(seed ^ machine.number << 48 ^ number << 16);
    let mut rng = Rng::with_seed(rng.u64(..));
    let mut one = |of: &[&'static str]| of[rng.usize(..of.len())];
    let mut options = vec![one(VERIFY)];
    for (name, of) in [
        ("--channels", CHANNELS),
        ("--compression", COMPRESSION),
        ("--throttle", THROTTLE),
        ("--max-bandwidth", BANDWIDTH),
        ("--fingerprints", FINGERPRINTS),
        ("--downtime-limit", DOWNTIME),
    ] {
        options.extend([name, one(of)]);
    }
    // Without fingerprints a disk with direct I/O is refused (docs/qemu.md), as libvirt has it
    // here.
    if machine.adapter == Adapter::Libvirt
        && let Some(fingerprints) =
            options.iter_mut().skip_while(|it| **it != "--fingerprints").nth(1)
    {
        *fingerprints = "on";
    }
    let granularity = one(GRANULARITY);
    if machine.outfit.disk {
        options.extend(["--disk-granularity", granularity]);
    }
    let strike =
        (rng.u8(..100) < strikes.share).then(|| strike(&mut rng, machine, strikes)).flatten();
    Drawn { options, strike }
}

/// A fault at a random step that does not take the guest with it.
fn strike(rng: &mut Rng, machine: &Machine, strikes: &Strikes) -> Option<Strike> {
    let points = &strikes.points;
    let wanted = |point: &Point, phase: Phase| match strikes.only {
        None => true,
        Some(only) => only.number == point.number && only.phase.is_none_or(|it| it == phase),
    };
    let candidates: Vec<(usize, Phase)> = (0..)
        .zip(points)
        .filter(|(_, point)| is_survived(point))
        .flat_map(|(index, point)| point.phases.iter().map(move |phase| (index, *phase)))
        .filter(|(index, phase)| points[*index].can_strike(machine.adapter, *phase))
        .filter(|(index, phase)| wanted(&points[*index], *phase))
        .collect();
    let (point, phase) = *candidates.get(rng.usize(..candidates.len().max(1)))?;
    let seed = rng.u64(..1 << 32);
    Some(Strike { point, moment: Moment::at(phase), seed })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::machine::machines;

    fn options(seed: u64, vm: usize, number: u64) -> Vec<&'static str> {
        draw(seed, &machines()[vm], number, &Strikes::some(0)).options
    }

    #[test]
    fn a_move_is_drawn_again_from_its_seed_and_number() {
        assert_eq!(options(7, 2, 40), options(7, 2, 40));
        let different = [options(8, 2, 40), options(7, 0, 40), options(7, 2, 41)];
        assert!(different.iter().all(|other| *other != options(7, 2, 40)), "{different:?}");
    }

    #[test]
    fn every_value_is_drawn_and_memory_is_always_compared() {
        let moves: Vec<_> = (0..200).map(|number| options(1, 0, number)).collect();
        assert!(moves.iter().all(|options| options[0].starts_with("--verify")));
        let drawn: BTreeSet<_> = moves.iter().flatten().copied().collect();
        let all = [CHANNELS, COMPRESSION, VERIFY, THROTTLE, BANDWIDTH, FINGERPRINTS, DOWNTIME];
        for value in all.iter().chain([&GRANULARITY]).copied().flatten() {
            assert!(drawn.contains(value), "{value}");
        }
    }

    #[test]
    fn options_of_a_defect_stand_in_the_place_of_those_that_were_drawn() {
        let machine = &machines()[0];
        let before = draw(7, machine, 1, &Strikes::some(0));
        let mut drawn = before.clone();
        drawn.replace(&["--channels", "1", "--fault", "x"]);
        assert_eq!(drawn.options.len(), before.options.len() + 2);
        assert_eq!(drawn.options[0], before.options[0]);
        let of = |name| drawn.options.iter().filter(|option| **option == name).count();
        assert_eq!((of("--channels"), of("--compression")), (1, 1));
        assert!(drawn.options.ends_with(&["--channels", "1", "--fault", "x"]));
    }

    #[test]
    fn faults_strike_as_often_as_they_are_asked_for_and_none_takes_the_guest() {
        let points = points();
        for machine in machines() {
            let strikes = |faults| {
                let strikes = Strikes::some(faults);
                let drawn = (0..500).filter_map(|n| draw(1, &machine, n, &strikes).strike);
                drawn.collect::<Vec<_>>()
            };
            assert!(strikes(0).is_empty());
            assert!((60..140).contains(&strikes(20).len()), "{}", strikes(20).len());
            for strike in strikes(100) {
                let point = &points[strike.point];
                assert!(point.can_strike(machine.adapter, strike.moment.phase));
                assert!(!matches!(point.must, Must::GoWithItsVm(_)), "{}", point.number);
            }
        }
    }

    #[test]
    fn one_fault_strikes_each_move_at_the_step_that_is_asked_for() {
        let machine = &machines()[4];
        for (text, phase) in [("11@state", Some(Phase::State)), ("11", None)] {
            let strikes = Strikes::every(one_fault(text).unwrap());
            assert_eq!(strikes.words(), format!(" --fault {text}"));
            for number in 0..50 {
                let strike = draw(1, machine, number, &strikes).strike.unwrap();
                assert_eq!(strikes.points[strike.point].number, 11);
                assert!(phase.is_none_or(|phase| strike.moment.phase == phase));
            }
        }
        let refused = |text| one_fault(text).unwrap_err();
        assert!(refused("11@offer").contains("does not strike at"), "{}", refused("11@offer"));
        assert!(refused("11@nowhere").starts_with("one of: "));
        assert!(refused("0").contains("docs/reliability.md"));
        let takes = points().into_iter().find(|point| !is_survived(point)).unwrap().number;
        assert!(refused(&takes.to_string()).contains("takes the guest"));
    }
}
