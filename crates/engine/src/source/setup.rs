//! Before any write is tracked: the machine is offered to the destination, whose questions about it
//! are answered until it accepts.

use std::io;
use std::time::Duration;

use godwit_fingerprints::{Key, PageFingerprints};
use godwit_policy::Settings;
use godwit_protocol::source::Input;
use godwit_wire::{
    ANSWER_LIMIT, BLOCKS_LIMIT, BlockOffer, DISKS_LIMIT, Facts, Feature, Features, Message, Offer,
    QUESTIONS_LIMIT,
};

use super::common::Common;
use super::disks::Disks;
use super::fault::Fault;
use super::random::new_fingerprints;
use super::record::Record;
use super::{Options, PEER, PostCopy, Source, Verify};
use crate::compression::Codecs;
use crate::handle::{MigrationHandle, Own};
use crate::remainder::Mark;
use crate::return_proof::prints_seed;
use crate::vm::SourceVm;
use crate::{EngineError, limits};

/// What a migration begins with.
pub(super) struct Setup {
    pub(super) settings: Settings,
    pub(super) own: Own,
    pub(super) disks: Disks,
    pub(super) fingerprints: Option<(PageFingerprints, Key)>,
    /// Whether data may land in guest memory without the tracker's knowledge.
    pub(super) direct_io: bool,
    /// A godwit that was killed had begun: the destination has accepted its offer.
    pub(super) restarted: bool,
    /// The destination reads back what it places.
    pub(super) proves: bool,
    /// What both sides have, as soon as the destination has accepted.
    pub(super) common: Common,
    /// What the destination's host has, where it was asked and tells.
    pub(super) facts: Option<Facts>,
    /// How long it took to connect.
    pub(super) round_trip: Duration,
}

impl Setup {
    pub(super) fn new(
        vm: &mut dyn SourceVm,
        options: &Options,
        handle: &MigrationHandle,
    ) -> io::Result<Self> {
        let fingerprints = options.fingerprints.then(new_fingerprints).transpose()?;
        let (settings, own) = handle.begin(&options.to);
        let disks = Disks::new(vm.moving_disks().map_or_else(Vec::new, |vm| vm.disks()));
        let common = Common::default();
        Ok(Self {
            settings,
            own,
            disks,
            fingerprints,
            direct_io: false,
            restarted: false,
            proves: false,
            common,
            facts: None,
            round_trip: Duration::ZERO,
        })
    }

    /// Connects and offers the machine, until the destination accepts it.
    pub(super) fn offer(&mut self, source: &mut Source<'_>) -> Result<Input, EngineError> {
        source.allow_post_copy(None)?;
        let mark = source.mark_safe_place()?;
        self.common = self.present(source, Presented::ToMove, mark.as_ref())?;
        drop(mark);
        source.agreed(self.common);
        source.allow_post_copy(Some(self.common.features))?;
        if !source.options.reconnect.is_zero() {
            // A destination that is started anew tells what it holds by fingerprints of this key.
            let ((id, secret, _), _) = source.session.known_by();
            self.use_key(Key::new(prints_seed(id, secret)));
            source.session.ask_to_keep()?;
            source.write_record(&self.common, &self.disks)?;
        }
        self.have_proven(source)?;
        Ok(Input::Accepted)
    }

    /// Has the destination read back what it places, if that is wanted and it can.
    fn have_proven(&mut self, source: &Source<'_>) -> Result<(), EngineError> {
        let wanted = source.options.verify.reads_back();
        let key = self.fingerprints.as_ref().map(|(_, key)| key);
        if let Some(key) = key.filter(|_| wanted && self.common.features.contains(Feature::Proof)) {
            source.session.say(&Message::Prove { seed: key.seed() })?;
            self.proves = true;
        }
        let tells = self.disks.is_empty() || self.common.features.contains(Feature::DiskProof);
        if source.options.audit && !(self.proves && tells) {
            return Err(EngineError::NoAudit);
        }
        Ok(())
    }

    /// The migration of `record` is taken up.
    pub(super) fn restart(
        &mut self,
        source: &mut Source<'_>,
        record: &Record,
    ) -> Result<(), EngineError> {
        if source.options.audit {
            // When was sent what the one before has sent is not known.
            return Err(EngineError::NoAudit);
        }
        self.look_at_io(source)?;
        (self.restarted, self.common) = (true, record.common());
        source.allow_post_copy(Some(self.common.features))?;
        // The destination has seen that it is the same storage; whether it is there still is ours.
        drop(source.mark_safe_place()?);
        self.use_key(Key::new(prints_seed(record.id(), record.secret())));
        Ok(())
    }

    fn use_key(&mut self, key: Key) {
        self.fingerprints = self.fingerprints.take().map(|(fingerprints, _)| (fingerprints, key));
    }

    fn look_at_io(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        let direct_io = source.vm.direct_io().is_some();
        if direct_io && self.fingerprints.is_none() {
            return Err(EngineError::DirectIo);
        }
        self.direct_io = direct_io && !source.session.made_up().is(Fault::TrustTracker);
        Ok(())
    }

    /// Connects and tells of the machine, to whom it is `presented`, and that there is a `mark` of
    /// where the copy is to be made, until the destination accepts it; what both sides have.
    pub(super) fn present(
        &mut self,
        source: &mut Source<'_>,
        presented: Presented,
        mark: Option<&Mark>,
    ) -> Result<Common, EngineError> {
        self.look_at_io(source)?;
        let most = [
            ("RAM blocks", source.ram.len(), BLOCKS_LIMIT),
            ("disks to move", self.disks.len(), DISKS_LIMIT),
        ];
        if let Some((what, count, limit)) = most.into_iter().find(|(_, count, limit)| count > limit)
        {
            return Err(EngineError::TooMany { what, count, limit });
        }
        let (connected_in, greeted_in) = source.session.connect()?;
        self.round_trip = connected_in;
        source.meter.answered(greeted_in);
        let disks = source.vm.moving_disks();
        let granularity = disks.map_or_else(Vec::new, |vm| vm.disk_granularity());
        let mut features = source.session.version().features();
        if mark.is_none() {
            features = features.without(Feature::PostCopySafe);
        }
        if features.contains(Feature::PostCopy) && source.options.post_copy != PostCopy::Never {
            features = features.with(Feature::PostCopyWanted);
        }
        if !source.options.late_packets {
            features = features.without(Feature::LatePackets);
        }
        if let Presented::ToMove = presented {
            features = features.without(Feature::Facts);
        }
        let blocks = source.ram.iter();
        let blocks = blocks
            .map(|block| BlockOffer { name: block.name().to_owned(), pages: block.pages() })
            .collect();
        let offer = Offer {
            channels: source.channels(),
            codecs: Codecs::ALL.0,
            features,
            verify: source.options.verify != Verify::No,
            running: source.vm.was_running(),
            machine: source.vm.machine().to_owned(),
            blocks,
            disks: self.disks.offers(&granularity),
        };
        source.session.say(&match presented {
            Presented::ToMove => Message::Offer(offer),
            Presented::ToAsk => Message::Inquiry(offer),
        })?;
        source.vm.foresee_questions();
        answer_questions(source, features, &mut self.facts)
    }
}

/// What a machine is told of for.
#[derive(Clone, Copy)]
pub(super) enum Presented {
    /// It is to move.
    ToMove,
    /// Only to know whether it could.
    ToAsk,
}

/// What the destination says to an offer.
enum Said {
    Question(Vec<u8>),
    Facts(Facts),
    Accept(u32, Features),
}

/// Answers what the destination asks about the machine, until it accepts; what both sides have of
/// the features that were `offered`. What its host has is put into `facts`, where it tells.
fn answer_questions(
    source: &mut Source<'_>,
    offered: Features,
    facts: &mut Option<Facts>,
) -> Result<Common, EngineError> {
    let may_tell = offered.contains(Feature::Facts);
    for _ in 0..=QUESTIONS_LIMIT {
        let what = "the destination to accept";
        let said =
            source.session.await_message(
                source.vm,
                what,
                limits::ANSWER,
                |message| match message {
                    Message::Accept { codecs, features } => Some(Said::Accept(*codecs, *features)),
                    Message::Question(question) => Some(Said::Question(question.clone())),
                    Message::Facts(facts) if may_tell => Some(Said::Facts(facts.clone())),
                    _ => None,
                },
            )?;
        let question = match said {
            Said::Accept(codecs, features) => {
                let features = source.session.accepted(offered, features)?;
                return Ok(Common { codecs: Codecs::ALL.common(Codecs(codecs)), features });
            }
            Said::Facts(told) => {
                *facts = Some(told);
                continue;
            }
            Said::Question(question) => question,
        };
        let answer = source.vm.answer(&question).map_err(EngineError::Vm)?;
        if answer.len() > ANSWER_LIMIT {
            return Err(EngineError::Panicked("main"));
        }
        source.session.say(&Message::Answer(answer))?;
    }
    let what = format!("it asked more than {QUESTIONS_LIMIT} questions");
    Err(EngineError::Protocol { peer: PEER, what })
}
