//! What a coordinator elsewhere asks, done on the host that is emptied.

use std::io::{BufRead, Write};
use std::path::Path;

use godwit_units::Rate;

use super::{Answer, Ask};
use crate::list::ListedVm;
use crate::moves::Moves;
use crate::plan::{Attempt, Home, Plan};
use crate::runner::Hands;

/// What depends on the host.
pub trait Host {
    /// Opens the evacuation `name`, with a lock where one is kept: where its files are, which may
    /// be said by `files`, and the hands.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open(&mut self, name: &str, files: Option<&Path>) -> Result<(Home, Moves), String>;
    /// The virtual machines that `manager` keeps here and that are to leave.
    ///
    /// # Errors
    /// As where the command is run that empties this host.
    fn vms(
        &mut self,
        manager: &str,
        only: &[String],
        except: &[String],
    ) -> Result<Vec<ListedVm>, String>;
}

/// Does what a coordinator elsewhere asks on `input`, until that ends.
///
/// # Errors
/// When nothing can be answered any more.
pub fn serve_hands(
    input: impl BufRead,
    mut output: impl Write,
    host: &mut impl Host,
) -> std::io::Result<()> {
    let mut moves: Option<Moves> = None;
    let mut plan: Option<Plan> = None;
    for line in input.lines() {
        let answer = match serde_json::from_str(&line?) {
            Err(error) => Answer::No(format!("not understood, is it of this release? {error}")),
            Ok(Ask::Open(name, files)) => match host.open(&name, files.as_deref()) {
                Ok((home, new)) => {
                    moves = Some(new);
                    Answer::Home(home)
                }
                Err(why) => Answer::No(why),
            },
            Ok(Ask::Vms { manager, only, except }) => {
                host.vms(&manager, &only, &except).map_or_else(Answer::No, Answer::Vms)
            }
            Ok(Ask::Plan(new)) => {
                plan = Some(new);
                Answer::Done
            }
            Ok(ask) => match (&mut moves, &plan) {
                (Some(moves), _) if matches!(ask, Ask::Clear) => {
                    moves.clear().map_or_else(Answer::No, |()| Answer::Done)
                }
                (Some(moves), Some(plan)) => done(moves, plan, &ask),
                _ => Answer::No("it was not said what of".to_owned()),
            },
        };
        writeln!(output, "{}", serde_json::to_string(&answer).unwrap_or_default())?;
        output.flush()?;
    }
    Ok(())
}

fn done(moves: &mut Moves, plan: &Plan, ask: &Ask) -> Answer {
    let known =
        |attempt: &Attempt| attempt.vm < plan.vms.len() && attempt.to < plan.destinations.len();
    match ask {
        Ask::Begin(attempt, _)
        | Ask::Look(attempt)
        | Ask::Pace(attempt, _)
        | Ask::Cancel(attempt)
            if !known(attempt) =>
        {
            Answer::No("there is no such VM in the plan".to_owned())
        }
        Ask::Begin(attempt, rate) => {
            let begun = moves.begin(plan, attempt, Rate::from_bytes_per_second(*rate));
            begun.map_or_else(Answer::No, |()| Answer::Done)
        }
        Ask::Look(attempt) => Answer::Seen(moves.look(plan, attempt)),
        Ask::Pace(attempt, rate) => {
            if moves.pace(plan, attempt, Rate::from_bytes_per_second(*rate)) {
                Answer::Done
            } else {
                Answer::No("it cannot be told".to_owned())
            }
        }
        Ask::Cancel(attempt) => {
            moves.cancel(plan, attempt);
            Answer::Done
        }
        Ask::Open(..) | Ask::Clear | Ask::Plan(_) | Ask::Vms { .. } => Answer::Done,
    }
}
