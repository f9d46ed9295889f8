//! The coordinator at work: takes one turn after the other, and hears meanwhile of what operators
//! want, at its socket, in the store and by signals.
//!
//! Invariant: whoever asks is answered between two turns, whatever becomes of the host.

use std::sync::mpsc::Receiver as Requests;
use std::time::{Duration, Instant};

use godwit_engine::Cancel;
use godwit_evacuate::{EvacuateError, Event, Plan, Runner, Store};
use godwit_units::Rate;
use serde_json::json;

use super::control::Asked;
use super::live::Live;
use super::{Arguments, limits, live, tell};

/// How often moves are looked at.
const TICK: Duration = Duration::from_millis(100);
/// A terminal hears of those under way this often.
const NEWS: Duration = Duration::from_secs(5);
/// How often a store that is shared is asked what operators want, and told how far it is.
const HEED: Duration = Duration::from_millis(500);
/// How often moves are told their shares once more, where other coordinators may have told them
/// something else, or their host may not have heard.
const TELL_AGAIN: Duration = Duration::from_secs(2);
/// Who is to end does not wait longer for a host that does not answer.
const LEAVE: Duration = Duration::from_secs(5);

/// Where a coordinator works: who may ask it for something, and to whom it tells.
pub(super) struct Desk<'a> {
    pub(super) arguments: &'a Arguments,
    pub(super) names: &'a Plan,
    pub(super) cancel: &'a Cancel,
    pub(super) requests: Option<&'a Requests<Asked>>,
    /// Others stand by, and wishes may be found in the store.
    pub(super) shared: bool,
}

/// How a coordinator comes to an end.
pub(super) enum End {
    /// There is nothing left to do.
    Over,
    /// Others go on, or the moves under way by themselves.
    Left,
}

/// Coordinates until there is nothing left to do.
pub(super) fn coordinate<S: Store>(
    runner: &mut Runner<'_, S>,
    desk: &Desk<'_>,
    events: &[Event],
) -> Result<End, EvacuateError> {
    let json = desk.arguments.json;
    // What another host does is not asked at sockets here.
    let on = desk.arguments.shared.on();
    let live = (!json && on.is_none()).then(|| Live::start(&desk.arguments.name)).flatten();
    let say = |events: &[Event]| {
        if !events.is_empty() {
            live::beside(live.as_ref(), || tell::events(desk.names, events, json));
        }
    };
    let limits_of = |runner: &Runner<'_, S>| {
        let plan = runner.plan();
        (Rate::from_bytes_per_second(plan.bytes_per_second), plan.at_once)
    };
    say(events);
    let (mut news, mut heard, mut told) = (Instant::now(), Instant::now(), Instant::now());
    let (mut ends, mut is_lost) = (None, false);
    while !runner.is_over() {
        if desk.cancel.is_cancelled() {
            if desk.shared {
                return Ok(End::Left);
            }
            if !runner.wanted().cancelled {
                runner.cancel()?;
            }
            let since = ends.get_or_insert_with(Instant::now);
            if runner.is_reached() {
                *since = Instant::now();
            } else if since.elapsed() > LEAVE {
                return Ok(End::Left);
            }
        }
        while let Some(Ok((request, answer))) = desk.requests.map(Requests::try_recv) {
            let done = answered(&request, runner);
            if let Ok(Some(limits)) = &done {
                live::beside(live.as_ref(), || tell::limits(limits, json));
            }
            let report = || {
                let mut report = tell::as_json(&runner.report());
                if let Some(home) = desk.names.home.as_ref().filter(|_| on.is_some()) {
                    report["host"] = json!(home.host);
                }
                report
            };
            let _ = answer.send(done.map_or_else(|why| json!({ "error": why }), |_| report()));
        }
        if desk.shared && heard.elapsed() > HEED {
            heard = Instant::now();
            let before = limits_of(runner);
            if runner.heed()? && limits_of(runner) != before {
                live::beside(live.as_ref(), || tell::limits(&limits_of(runner), json));
            }
            runner.publish()?;
        }
        if (desk.shared || on.is_some()) && told.elapsed() > TELL_AGAIN {
            told = Instant::now();
            runner.tell_again()?;
        }
        say(&runner.turn()?);
        let trouble = runner.trouble();
        if trouble.is_some() != is_lost {
            is_lost = trouble.is_some();
            tell::reached(on.unwrap_or_default(), trouble.as_deref(), json);
        }
        if let Some(live) = &live {
            live.show(&runner.report());
        } else if news.elapsed() > NEWS && !json {
            news = Instant::now();
            tell::news(&runner.report());
        }
        if !runner.is_over() {
            std::thread::sleep(TICK);
        }
    }
    Ok(End::Over)
}

/// Does what somebody has asked for at the control socket; the limits, if they are others now.
///
/// # Errors
/// Why not: nothing has changed then.
fn answered<S: Store>(
    request: &str,
    runner: &mut Runner<'_, S>,
) -> Result<Option<(Rate, u32)>, String> {
    match request {
        "pause" => runner.pause(true).map_err(|error| error.to_string())?,
        "continue" => runner.pause(false).map_err(|error| error.to_string())?,
        "cancel" => runner.cancel().map_err(|error| error.to_string())?,
        "status" => {}
        other => {
            let plan = runner.plan();
            let now = (Rate::from_bytes_per_second(plan.bytes_per_second), plan.at_once);
            let (budget, at_once) = limits::asked(other, now)?;
            runner.limit(budget, at_once).map_err(|error| error.to_string())?;
            return Ok(Some((budget, at_once)));
        }
    }
    Ok(None)
}
