//! Options by which tests make up faults. Only a build with the feature `test-hooks` has them, and
//! even that shows them in no help.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use godwit_engine::{destination, source};
use godwit_units::parse_duration;

/// Those of `godwit migrate`.
#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// Make up a fault
    #[arg(long, hide = true)]
    fault: Option<SourceFault>,
}

impl Migrate {
    pub(crate) fn put_into(&self, options: &mut source::Options) {
        options.fault = self.fault.map(Into::into);
    }
}

/// Those of `godwit receive`.
#[derive(Debug, Args)]
pub(crate) struct Receive {
    /// The number of a channel that places every frame so late, as NUMBER:TIME
    #[arg(long, hide = true, value_parser = slow_channel)]
    slow_channel: Option<(usize, Duration)>,

    /// Make up a fault
    #[arg(long, hide = true)]
    fault: Option<DestinationFault>,

    /// Have the threads that place pages try to open a file
    #[arg(long, hide = true)]
    trespass: bool,

    /// Place pages wrongly
    #[arg(long, hide = true)]
    defect: Option<DestinationDefect>,

    #[command(flatten)]
    pub(crate) placed: Placed,
}

/// Of whoever has the engine that takes a guest in: `godwit receive`, and a microvm.
#[derive(Debug, Args)]
pub(crate) struct Placed {
    /// Write down what comes when the guest runs here already
    #[arg(long, hide = true)]
    placed: Option<PathBuf>,
}

impl Placed {
    /// Opens what is to be written to.
    pub(crate) fn open(&self) -> io::Result<()> {
        if let Some(path) = &self.placed {
            let file = File::options().create(true).append(true).open(path)?;
            destination::write_placed(file);
        }
        Ok(())
    }
}

impl Receive {
    pub(crate) fn faults(&self) -> destination::Faults {
        destination::Faults {
            slow_channel: self.slow_channel,
            kill: self.fault.map(Into::into),
            trespass: self.trespass,
            defect: self.defect.map(Into::into),
        }
    }
}

fn slow_channel(text: &str) -> Result<(usize, Duration), String> {
    let (number, late) = text.split_once(':').ok_or("write NUMBER:TIME")?;
    let number = number.parse().map_err(|_| "the number of a channel")?;
    Ok((number, parse_duration(late).map_err(|error| error.to_string())?))
}

/// The engine's faults by name.
macro_rules! names {
    ($name:ident of $of:path: $($variant:ident)*) => {
        #[derive(Clone, Copy, Debug, ValueEnum)]
        #[allow(clippy::enum_variant_names, reason = "they are the words of the command line")]
        enum $name { $($variant),* }

        impl From<$name> for $of {
            fn from(name: $name) -> Self {
                match name { $($name::$variant => Self::$variant),* }
            }
        }
    };
}

names!(SourceFault of source::Fault:
    CutAfterCommit LoseCommit WrongDigest LoseFarewell TrustTracker HoldStopped HoldReady
    KillAfterPrepare KillAfterStop KillInLastRound KillAfterRelease KillAfterLastRound
    KillAfterDigests KillAfterState KillAfterReady KillBeforeCommit KillAfterCommit
    KillAfterFarewell PanicAfterStop SkipDirtyPage ForgetLastRound BelieveHints DropExtent);
names!(DestinationDefect of destination::Defect:
    LateOldPage SwapPages FlipBit RunAhead);
names!(DestinationFault of destination::Fault:
    KillAfterPrepare KillAfterLoad KillAfterReady KillBeforeRun KillAfterRun);
