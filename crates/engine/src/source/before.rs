//! What somebody else has to do before the guest is stopped: tell a network or a load balancer.
//!
//! Invariant: the guest is not stopped before it is done, and it runs meanwhile; what it writes is
//! sent by the rounds that follow, not by the last one. Where it fails the guest stays.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::Source;
use crate::{EngineError, limits, threads};

/// Is done in a thread of its own while both machines get ready, and once more where connections
/// are lost meanwhile. What it fails with is said to whoever migrates.
///
/// ```
/// use godwit_engine::source::{BeforeSwitchover, Options};
///
/// let tell = BeforeSwitchover::new(|| Err("the switch does not answer".to_owned()));
/// let options = Options { before_switchover: Some(tell), ..Options::new("west:4444".parse()?) };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct BeforeSwitchover(Arc<dyn Fn() -> Result<(), String> + Send + Sync>);

impl BeforeSwitchover {
    /// `act`, which nobody ends when the migration fails otherwise: it should look for itself.
    pub fn new(act: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(act))
    }

    /// Begins.
    pub(super) fn start(&self) -> Result<Acting, EngineError> {
        let act = Arc::clone(&self.0);
        threads::start("hook", move || act()).map(Acting)
    }
}

impl fmt::Debug for BeforeSwitchover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BeforeSwitchover")
    }
}

/// It is being done.
pub(super) struct Acting(JoinHandle<Result<(), String>>);

impl Acting {
    /// Waits until it is done; whatever else ends the migration ends the wait.
    pub(super) fn wait(self, source: &mut Source<'_>) -> Result<(), EngineError> {
        while !self.0.is_finished() {
            source.check_fate()?;
            if let Some(event) = source.session.next_event(source.vm, limits::TICK / 5)? {
                return Err(event.out_of_place());
            }
        }
        let done = self.0.join().map_err(|_| EngineError::Panicked("hook"))?;
        done.map_err(EngineError::Hook)
    }
}
