//! What befalls the guest of a source by itself: it powers off, panics or is reset.
//!
//! A guest that was reset boots anew in memory that is tracked as before, so it is followed. One
//! that powered off or panicked and is kept by its QEMU (`-no-shutdown`, `-action panic=pause`) is
//! not moved: the destination would be told to run it, and whoever looks after it looks at the
//! source. QEMU loses the run state of a guest that does so just when it is being stopped, so its
//! events are what counts.

use crate::monitor::Event;

/// What is known so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fate {
    ended: Option<Ended>,
    /// Whether the vCPUs were stopped for the handover.
    still: bool,
    /// Whether the guest was reset since then.
    reset: bool,
}

/// How a guest has ended whose QEMU goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    PoweredOff,
    Panicked,
}

impl Ended {
    /// QEMU's run state of such a guest.
    fn state(self) -> &'static str {
        match self {
            Self::PoweredOff => "shutdown",
            Self::Panicked => "guest-panicked",
        }
    }
}

impl Fate {
    /// Takes in an event of QEMU's (qapi/run-state.json).
    pub(crate) fn take(&mut self, event: &Event) {
        match event.name.as_str() {
            "SHUTDOWN" => {
                // A panic that is to end QEMU comes as a shutdown, too.
                self.ended.get_or_insert(Ended::PoweredOff);
            }
            // With `-action panic=none` it runs on.
            "GUEST_PANICKED" if event.data["action"] != "run" => self.ended = Some(Ended::Panicked),
            "RESET" => {
                self.reset |= self.still;
                self.ended = None;
            }
            "RESUME" => self.ended = None,
            _ => {}
        }
    }

    /// The vCPUs were stopped for the handover: a reset from here on changes memory that nobody
    /// looks at again.
    pub(crate) fn stands_still(&mut self) {
        (self.still, self.reset) = (true, false);
    }

    /// The guest is brought back.
    pub(crate) fn runs_again(&mut self) {
        (self.still, self.reset) = (false, false);
    }

    pub(crate) fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// What the operator is told, where the guest is not to be moved any more. QEMU is asked for
    /// its run state where that says more than its events, which come earlier.
    pub(crate) fn words(
        &self,
        has_ended: bool,
        run_state: impl FnOnce() -> String,
    ) -> Option<String> {
        let Some(ended) = self.ended else {
            return self.reset.then(|| {
                "the guest was reset while it stood still for the handover: start the migration \
                 again"
                    .to_owned()
            });
        };
        let what = match ended {
            Ended::PoweredOff => "the guest powered off",
            Ended::Panicked => "the guest panicked",
        };
        if has_ended {
            return Some(what.to_owned());
        }
        let state = if self.still { ended.state().to_owned() } else { run_state() };
        (state == ended.state()).then(|| {
            let cure = match ended {
                Ended::PoweredOff => {
                    "`quit` its QEMU, or `system_reset` and `cont` to start it anew"
                }
                Ended::Panicked => {
                    "look at it where it is, and `system_reset` it before it is moved"
                }
            };
            format!("{what} and does not run any more: {cure}")
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::{Value, json};

    use super::*;

    fn event(name: &str, data: Value) -> Event {
        Event { name: name.to_owned(), data, emitted: Duration::ZERO, at: Instant::now() }
    }

    fn fate(events: &[(&str, Value)]) -> Fate {
        let mut fate = Fate::default();
        events.iter().for_each(|(name, data)| fate.take(&event(name, data.clone())));
        fate
    }

    #[test]
    fn a_guest_that_ended_is_told_once_its_qemu_says_so_too() {
        let fate = fate(&[("SHUTDOWN", Value::Null), ("STOP", Value::Null)]);
        let told = |state: &str| fate.words(false, || state.to_owned());
        assert!(told("shutdown").unwrap().starts_with("the guest powered off and does not run"));
        // Somebody has run it again, which its events will tell, or QEMU is about to end.
        assert_eq!(told("running"), None);
        assert_eq!(fate.words(true, || unreachable!()).unwrap(), "the guest powered off");
    }

    #[test]
    fn a_panic_that_the_guest_outlives_is_no_end() {
        assert_eq!(fate(&[("GUEST_PANICKED", json!({ "action": "run" }))]).ended(), None);
        let kept = fate(&[("GUEST_PANICKED", json!({ "action": "pause" })), ("STOP", Value::Null)]);
        assert_eq!(kept.ended(), Some(Ended::Panicked));
        let shut =
            fate(&[("GUEST_PANICKED", json!({ "action": "poweroff" })), ("SHUTDOWN", Value::Null)]);
        assert_eq!(shut.ended(), Some(Ended::Panicked));
    }

    #[test]
    fn a_guest_that_is_started_anew_is_followed() {
        for name in ["RESET", "RESUME"] {
            let fate = fate(&[("SHUTDOWN", Value::Null), (name, Value::Null)]);
            assert_eq!(fate.words(false, || "running".to_owned()), None, "{name}");
        }
    }

    #[test]
    fn a_reset_counts_only_while_the_guest_stands_still() {
        let mut fate = fate(&[("RESET", Value::Null)]);
        assert_eq!(fate.words(false, String::new), None);
        fate.stands_still();
        assert_eq!(fate.words(false, String::new), None);
        fate.take(&event("RESET", Value::Null));
        assert!(fate.words(false, String::new).unwrap().contains("was reset while it stood still"));
        fate.runs_again();
        assert_eq!(fate.words(false, String::new), None);
    }
}
