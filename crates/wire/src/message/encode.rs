//! Messages to bytes.

use super::Message;
use super::limits::{
    ANSWER_LIMIT, DIGESTS_PER_MESSAGE, MISSING_LIMIT, PACKET_LIMIT, PLACED_LIMIT,
    PRINTS_PER_MESSAGE, QUESTION_LIMIT, TEXT_LIMIT, TRIAL_LIMIT, WANTED_LIMIT,
};
use super::text::put_text;
use crate::frame::{HEADER_LEN, seal};

impl Message {
    /// The frame to send. Texts and names are cut to their limits.
    ///
    /// # Panics
    /// When there are more blocks, disks, digests, channels or bytes of device state, a question or
    /// an answer than a message may carry: a mistake of the caller.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = vec![0; HEADER_LEN];
        let mut aux = 0;
        match self {
            Self::Offer(offer) | Self::Inquiry(offer) => {
                aux = offer.encode(&mut frame);
            }
            Self::Abort { code, text } => {
                aux = *code as u64;
                put_text(&mut frame, text, TEXT_LIMIT);
            }
            Self::RoundEnd { round } => aux = (*round).into(),
            Self::Prove { seed } => aux = *seed,
            Self::Trial(filling) => {
                assert!(filling.len() <= TRIAL_LIMIT, "a trial of {} bytes", filling.len());
                frame.extend(filling);
            }
            Self::Tried { bytes, clock } => {
                aux = *bytes;
                frame.extend(clock.to_le_bytes());
            }
            Self::Facts(facts) => facts.encode(&mut frame),
            Self::RoundAck { round, flush } => {
                let micros = u32::try_from(flush.as_micros()).unwrap_or(u32::MAX);
                aux = u64::from(micros) << 32 | u64::from(*round);
            }
            Self::Digests { block, first, digests } => {
                assert!(digests.len() <= DIGESTS_PER_MESSAGE, "{} digests", digests.len());
                aux = u64::from(*block) << 32 | u64::from(*first);
                frame.extend(digests.iter().flat_map(|digest| digest.to_le_bytes()));
            }
            Self::Question(bytes) => {
                assert!(bytes.len() <= QUESTION_LIMIT, "a question of {} bytes", bytes.len());
                frame.extend(bytes);
            }
            Self::Answer(bytes) => {
                assert!(bytes.len() <= ANSWER_LIMIT, "an answer of {} bytes", bytes.len());
                frame.extend(bytes);
            }
            Self::DeviceState(bytes) => frame.extend(bytes),
            Self::LatePacket(bytes) => {
                assert!(bytes.len() <= PACKET_LIMIT, "a packet of {} bytes", bytes.len());
                frame.extend(bytes);
            }
            Self::Accept { codecs, features } => {
                aux = u64::from(features.0) << 32 | u64::from(*codecs);
            }
            Self::Keep(secret) => frame.extend(secret.0),
            Self::Resume { channels, proof } => {
                aux = (*channels).into();
                frame.extend(proof);
            }
            Self::Resumed { attempt, placed, proof } => {
                assert!(placed.len() <= PLACED_LIMIT, "{} channels", placed.len());
                aux = (*attempt).into();
                frame.extend(proof);
                frame.extend(placed.iter().flat_map(|count| count.to_le_bytes()));
            }
            Self::Prints { block, segment, prints } => {
                assert!(prints.len() <= PRINTS_PER_MESSAGE, "{} fingerprints", prints.len());
                aux = u64::from(*block) << 32 | u64::from(*segment);
                frame.extend(prints.iter().flat_map(|print| print.to_le_bytes()));
            }
            Self::PrintsRequest { disks } => aux = (*disks).into(),
            Self::Missing { block, last, runs } => {
                assert!(runs.len() <= MISSING_LIMIT, "{} runs", runs.len());
                aux = u64::from(*last) << 32 | u64::from(*block);
                let words = runs.iter().flat_map(|run| [run.start.0, run.count.0]);
                frame.extend(words.flat_map(u64::to_le_bytes));
            }
            Self::Wanted { block, pages } => {
                assert!(pages.len() <= WANTED_LIMIT, "{} pages", pages.len());
                aux = (*block).into();
                frame.extend(pages.iter().flat_map(|page| page.0.to_le_bytes()));
            }
            Self::Prepare
            | Self::Placed
            | Self::Prepared
            | Self::DigestRequest
            | Self::DeviceStateEnd
            | Self::Ready
            | Self::Commit
            | Self::Running
            | Self::Discarded
            | Self::Farewell
            | Self::Alive => {}
        }
        seal(&mut frame, self.kind(), 0, aux);
        frame
    }
}
