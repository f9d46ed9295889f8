//! The short form of `make faults`: some faults at some steps, and the page that tells of all.

use std::path::Path;

use anyhow::Context;
use godwit_faults::cell::{self, Moment};
use godwit_faults::phase::Phase;
use godwit_faults::point::points;
use godwit_faults::report::check_page;
use godwit_faults::rig::Adapter;

/// Which fault, and when.
const SOME: &[(u32, Phase)] = &[
    (1, Phase::FirstRound),
    (1, Phase::Prepared),
    (2, Phase::State),
    (4, Phase::LaterRound),
    (10, Phase::LastRound),
    (23, Phase::State),
    (41, Phase::FirstRound),
    (12, Phase::FirstRound),
    (46, Phase::FirstRound),
    (46, Phase::LastRound),
    (48, Phase::FirstRound),
    (49, Phase::State),
];

#[test]
fn some_faults_at_some_steps_are_survived() -> anyhow::Result<()> {
    let points = points();
    for adapter in [Adapter::Kvm, Adapter::Microvm] {
        let Some(mut rig) = adapter.rig()? else { continue };
        for (number, phase) in SOME {
            let point = points.iter().find(|point| point.number == *number);
            let point = point.filter(|point| point.adapters.contains(&adapter));
            let Some(point) = point else { continue };
            let mut rng = fastrand::Rng::with_seed(1);
            cell::run(rig.as_mut(), point, Moment::at(*phase), &mut rng)
                .with_context(|| format!("{adapter}: fault {number} at {phase}"))?;
        }
    }
    Ok(())
}

#[test]
fn the_page_tells_of_every_fault() -> anyhow::Result<()> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reliability.md");
    check_page(&points(), &page)
}
