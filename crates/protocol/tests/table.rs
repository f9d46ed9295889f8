//! The transition tables as they stand in `docs/state-machines.md`, generated from the code.
//!
//! `UPDATE_TABLES=1 cargo test -p godwit-protocol --test table` writes the page anew.
#![allow(clippy::unwrap_used)]

use std::fmt::Debug;

use godwit_protocol::source::LastPages;
use godwit_protocol::{destination as dst, source as src};

const SOURCE_STATES: [src::State; 18] = [
    src::State::Idle,
    src::State::Negotiating,
    src::State::PreCopy { round: 0 },
    src::State::Preparing { round: 0 },
    src::State::Closing { round: 0 },
    src::State::Severed { round: 0 },
    src::State::SeveredClosing { round: 0 },
    src::State::Stopping { round: 0 },
    src::State::StopAndCopy,
    src::State::Verifying,
    src::State::SavingState,
    src::State::AwaitingReady,
    src::State::Handover,
    src::State::InDoubt,
    src::State::Serving,
    src::State::SeveredServing,
    src::State::Done,
    src::State::Cancelled,
];
const SOURCE_INPUTS: [src::Input; 22] = [
    src::Input::Start,
    src::Input::Restart,
    src::Input::Follow,
    src::Input::Accepted,
    src::Input::RoundPlaced,
    src::Input::RoundSent,
    src::Input::MissingListed,
    src::Input::AllPlaced,
    src::Input::NextRound,
    src::Input::SwitchOver,
    src::Input::Prepared,
    src::Input::PreparedInHaste,
    src::Input::GuestStopped,
    src::Input::DigestsEqual,
    src::Input::StateSent,
    src::Input::Ready,
    src::Input::Running,
    src::Input::Discarded,
    src::Input::Reconnected,
    src::Input::LinkLost,
    src::Input::Resumed,
    src::Input::Failed,
];
const DESTINATION_STATES: [dst::State; 14] = [
    dst::State::Listening,
    dst::State::Receiving,
    dst::State::Prepared,
    dst::State::Severed,
    dst::State::SeveredPrepared,
    dst::State::Filling,
    dst::State::Loading,
    dst::State::Ready,
    dst::State::Starting,
    dst::State::Fetching,
    dst::State::SeveredFetching,
    dst::State::Running,
    dst::State::Done,
    dst::State::Discarded,
];
const DESTINATION_INPUTS: [dst::Input; 18] = [
    dst::Input::Offer,
    dst::Input::RoundEnd,
    dst::Input::Prepare,
    dst::Input::DigestRequest,
    dst::Input::PrintsRequest,
    dst::Input::Missing,
    dst::Input::AllPlaced,
    dst::Input::State,
    dst::Input::StateEnd,
    dst::Input::Loaded,
    dst::Input::Commit,
    dst::Input::Started,
    dst::Input::Farewell,
    dst::Input::LinkLost,
    dst::Input::Returned,
    dst::Input::Follow,
    dst::Input::Aborted,
    dst::Input::Failed,
];

/// `PreCopy { round: 0 }` as `PreCopy`.
fn name(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    text.split([' ', '(']).next().unwrap_or_default().to_owned()
}

fn rows<S: Copy + Debug + PartialEq, I: Copy + Debug, A: Debug, E>(
    states: &[S],
    inputs: &[I],
    step: impl Fn(S, I) -> Result<(S, Vec<A>), E>,
) -> String {
    let mut text =
        String::from("| state | input | next state | actions |\n| --- | --- | --- | --- |\n");
    for state in states {
        for input in inputs {
            if let Ok((next, actions)) = step(*state, *input) {
                let actions: Vec<String> = actions.iter().map(name).collect();
                let row = format!(
                    "| {} | {} | {} | {} |\n",
                    name(state),
                    name(input),
                    name(&next),
                    actions.join(", ")
                );
                text.push_str(&row);
            }
        }
    }
    text
}

#[test]
fn the_page_shows_what_the_code_does() {
    let source = |last| rows(&SOURCE_STATES, &SOURCE_INPUTS, |s, i| src::step(s, i, last));
    let destination =
        |left| rows(&DESTINATION_STATES, &DESTINATION_INPUTS, |s, i| dst::step(s, i, left));
    let page = format!(
        "# The state machines\n\nGenerated from `crates/protocol` by its test `table`, which fails \
         when this page and the code differ;\ndo not edit. What is not listed is an error, which \
         the engine treats as `Failed`. The conversation\nas a picture is in \
         `crates/protocol/src/lib.rs`.\n\n## Source\n\n{}\n## Source, with digests compared \
         (`--verify`)\n\n{}\n## Source, in post-copy\n\n{}\n## Destination\n\n{}\n## Destination, \
         once it was told what is missing (post-copy)\n\n{}",
        source(LastPages::Sent),
        source(LastPages::Compared),
        source(LastPages::Left),
        destination(false),
        destination(true),
    );
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/state-machines.md");
    if std::env::var_os("UPDATE_TABLES").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), page, "run it again with UPDATE_TABLES=1");
}
