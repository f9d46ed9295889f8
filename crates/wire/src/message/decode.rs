//! Bytes to messages.

use std::time::Duration;

use godwit_units::{PageIndex, PageRun};

use super::limits::{
    ANSWER_LIMIT, CHANNELS_LIMIT, DEVICE_STATE_CHUNK, DIGESTS_PER_MESSAGE, MISSING_LIMIT,
    PACKET_LIMIT, PLACED_LIMIT, PRINTS_PER_MESSAGE, QUESTION_LIMIT, TEXT_LIMIT, TRIAL_LIMIT,
    WANTED_LIMIT,
};
use super::text::{Reader, reason};
use super::{AbortCode, Facts, Message, Offer, Secret};
use crate::frame::{FrameHeader, FrameKind};
use crate::{Features, WireError};

impl Message {
    /// Reads a message from a frame whose checksum was found right.
    ///
    /// # Errors
    /// When the frame is not a message of the control connection or its payload is malformed.
    pub fn decode(header: &FrameHeader, payload: &[u8]) -> Result<Self, WireError> {
        let empty = |message: Self| {
            if payload.is_empty() {
                Ok(message)
            } else {
                Err(WireError::Length { what: "message without payload" })
            }
        };
        let number = |what| {
            let wrong = |_| WireError::Field { what, field: "number", value: header.aux };
            u32::try_from(header.aux).map_err(wrong)
        };
        let round = || number("round");
        let bytes = |limit, what, message: fn(Vec<u8>) -> Self| {
            if payload.len() <= limit {
                Ok(message(payload.to_vec()))
            } else {
                Err(WireError::Length { what })
            }
        };
        match header.kind {
            FrameKind::Pages | FrameKind::Barrier => {
                Err(WireError::Kind { kind: header.kind as u16 })
            }
            FrameKind::Keep => {
                let mut reader = Reader { what: "keep", rest: payload };
                let secret = Secret(reader.take()?);
                reader.end()?;
                Ok(Self::Keep(secret))
            }
            FrameKind::Resume => decode_resume(header.aux, payload),
            FrameKind::Resumed => decode_resumed(number("attempt")?, payload),
            FrameKind::Offer => Offer::decode(header.aux, payload).map(Self::Offer),
            FrameKind::Inquiry => Offer::decode(header.aux, payload).map(Self::Inquiry),
            FrameKind::Accept => empty(Self::Accept {
                codecs: header.aux as u32,
                features: Features((header.aux >> 32) as u32),
            }),
            FrameKind::Abort => {
                let code = AbortCode::ALL
                    .into_iter()
                    .find(|code| *code as u64 == header.aux)
                    .ok_or(WireError::Field { what: "abort", field: "code", value: header.aux })?;
                let mut reader = Reader { what: "abort", rest: payload };
                let text = reason(reader.text(TEXT_LIMIT)?);
                reader.end()?;
                Ok(Self::Abort { code, text })
            }
            FrameKind::RoundEnd => empty(Self::RoundEnd { round: round()? }),
            FrameKind::RoundAck => empty(Self::RoundAck {
                round: header.aux as u32,
                flush: Duration::from_micros(header.aux >> 32),
            }),
            FrameKind::Trial => bytes(TRIAL_LIMIT, "trial", Self::Trial),
            FrameKind::Tried => {
                let clock = payload.try_into();
                let clock = clock.map_err(|_| WireError::Length { what: "answer to a trial" })?;
                Ok(Self::Tried { bytes: header.aux, clock: u64::from_le_bytes(clock) })
            }
            FrameKind::Facts => Facts::decode(payload).map(Self::Facts),
            FrameKind::Prove => empty(Self::Prove { seed: header.aux }),
            FrameKind::Prepare => empty(Self::Prepare),
            FrameKind::Prepared => empty(Self::Prepared),
            FrameKind::DigestRequest => empty(Self::DigestRequest),
            FrameKind::Digests => {
                if !payload.len().is_multiple_of(16) || payload.len() > DIGESTS_PER_MESSAGE * 16 {
                    return Err(WireError::Length { what: "digests" });
                }
                let digest = |bytes: &[u8]| {
                    let mut word = [0; 16];
                    word.copy_from_slice(bytes);
                    u128::from_le_bytes(word)
                };
                Ok(Self::Digests {
                    block: (header.aux >> 32) as u32,
                    first: header.aux as u32,
                    digests: payload.chunks_exact(16).map(digest).collect(),
                })
            }
            FrameKind::PrintsRequest if header.aux > 1 => Err(WireError::Field {
                what: "request for fingerprints",
                field: "disks",
                value: header.aux,
            }),
            FrameKind::PrintsRequest => empty(Self::PrintsRequest { disks: header.aux == 1 }),
            FrameKind::Missing => decode_missing(header.aux, payload),
            FrameKind::Wanted => {
                let (words, []) = payload.as_chunks() else {
                    return Err(WireError::Length { what: "wanted pages" });
                };
                if words.is_empty() || words.len() > WANTED_LIMIT {
                    return Err(WireError::Length { what: "wanted pages" });
                }
                let page = |word: &[u8; 8]| PageIndex(u64::from_le_bytes(*word));
                Ok(Self::Wanted {
                    block: number("wanted pages")?,
                    pages: words.iter().map(page).collect(),
                })
            }
            FrameKind::Placed => empty(Self::Placed),
            FrameKind::Prints => {
                let (words, []) = payload.as_chunks() else {
                    return Err(WireError::Length { what: "fingerprints" });
                };
                if words.len() > PRINTS_PER_MESSAGE {
                    return Err(WireError::Length { what: "fingerprints" });
                }
                Ok(Self::Prints {
                    block: (header.aux >> 32) as u32,
                    segment: header.aux as u32,
                    prints: words.iter().map(|word| u64::from_le_bytes(*word)).collect(),
                })
            }
            FrameKind::DeviceState => {
                bytes(DEVICE_STATE_CHUNK, "piece of device state", Self::DeviceState)
            }
            FrameKind::Question => bytes(QUESTION_LIMIT, "question", Self::Question),
            FrameKind::Answer => bytes(ANSWER_LIMIT, "answer", Self::Answer),
            FrameKind::LatePacket => bytes(PACKET_LIMIT, "packet", Self::LatePacket),
            FrameKind::DeviceStateEnd => empty(Self::DeviceStateEnd),
            FrameKind::Ready => empty(Self::Ready),
            FrameKind::Commit => empty(Self::Commit),
            FrameKind::Running => empty(Self::Running),
            FrameKind::Discarded => empty(Self::Discarded),
            FrameKind::Farewell => empty(Self::Farewell),
            FrameKind::Alive => empty(Self::Alive),
        }
    }
}

fn decode_missing(aux: u64, payload: &[u8]) -> Result<Message, WireError> {
    const WHAT: &str = "missing pages";
    let (words, []) = payload.as_chunks::<16>() else {
        return Err(WireError::Length { what: WHAT });
    };
    if words.len() > MISSING_LIMIT {
        return Err(WireError::Length { what: WHAT });
    }
    let last = match aux >> 32 {
        flag @ 0..=1 => flag == 1,
        value => return Err(WireError::Field { what: WHAT, field: "last", value }),
    };
    let mut runs: Vec<PageRun> = Vec::with_capacity(words.len());
    for word in words {
        let word = u128::from_le_bytes(*word);
        let (start, count) = (word as u64, (word >> 64) as u64);
        let wrong = |field, value| WireError::Field { what: WHAT, field, value };
        if count == 0 || start.checked_add(count).is_none() {
            return Err(wrong("pages", count));
        }
        // Runs that touch are one.
        if runs.last().is_some_and(|before| before.end().0 >= start) {
            return Err(wrong("start", start));
        }
        runs.push(PageRun::new(start, count));
    }
    Ok(Message::Missing { block: aux as u32, last, runs })
}

fn decode_resume(aux: u64, payload: &[u8]) -> Result<Message, WireError> {
    const WHAT: &str = "resume";
    let channels = u8::try_from(aux).ok().filter(|count| (1..=CHANNELS_LIMIT).contains(count));
    let channels =
        channels.ok_or(WireError::Field { what: WHAT, field: "channels", value: aux })?;
    let mut reader = Reader { what: WHAT, rest: payload };
    let proof = reader.take()?;
    reader.end()?;
    Ok(Message::Resume { channels, proof })
}

fn decode_resumed(attempt: u32, payload: &[u8]) -> Result<Message, WireError> {
    const WHAT: &str = "resumed";
    let mut reader = Reader { what: WHAT, rest: payload };
    let proof = reader.take()?;
    if !reader.rest.len().is_multiple_of(8) || reader.rest.len() > PLACED_LIMIT * 8 {
        return Err(WireError::Length { what: WHAT });
    }
    let mut placed = Vec::new();
    while !reader.rest.is_empty() {
        placed.push(u64::from_le_bytes(reader.take()?));
    }
    Ok(Message::Resumed { attempt, placed, proof })
}
