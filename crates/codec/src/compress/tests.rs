//! Both sides against each other, and against input that nobody compressed.

use proptest::prelude::*;

use super::*;
use crate::synthetic::Image;
use crate::{CodecId, Corruption, Decompressor};

const CODECS: [Codec; 5] = [
    Codec::Lz4 { acceleration: 1 },
    Codec::Lz4 { acceleration: 16 },
    Codec::Zstd { level: 1 },
    Codec::Zstd { level: -3 },
    Codec::Zstd { level: 3 },
];

fn compressed(codec: Codec, pages: &[&[u8]]) -> Vec<u8> {
    let length: usize = pages.iter().map(|slice| slice.len()).sum();
    let mut output = vec![0; length + length / 8 + 64];
    let made = Compressor::new().compress(codec, pages, &mut output).unwrap().unwrap();
    output.truncate(made);
    output
}

#[test]
fn what_goes_in_comes_out() {
    let mut compressor = Compressor::new();
    let mut decompressor = Decompressor::new();
    for (_, image) in Image::ALL {
        for length in [4096, 5 * 4096, 16 * 4096, 17 * 4096, 64 * 4096, BATCH_LIMIT] {
            let pages = image.bytes(3, length);
            for codec in CODECS {
                let mut output = vec![0; length + length / 8 + 64];
                let made = compressor.compress(codec, &[&pages], &mut output).unwrap().unwrap();
                let mut placed = vec![1; length];
                decompressor.decompress(codec.id(), &output[..made], &mut placed).unwrap();
                assert!(placed == pages, "{image:?} {length} {codec}");
            }
        }
    }
}

#[test]
fn what_does_not_shrink_is_given_up() {
    let random = Image::Random.bytes(1, 256 << 10);
    let text = Image::Text.bytes(1, 256 << 10);
    let mut output = vec![0; worth(random.len())];
    let mut compressor = Compressor::new();
    for codec in CODECS {
        assert_eq!(compressor.compress(codec, &[&random], &mut output).unwrap(), None, "{codec}");
    }
    for codec in [Codec::Lz4 { acceleration: 1 }, Codec::Zstd { level: 1 }] {
        assert!(compressor.compress(codec, &[&text], &mut output).unwrap().is_some(), "{codec}");
    }
    assert_eq!(compressor.compress(Codec::None, &[&text], &mut output).unwrap(), None);
}

#[test]
fn contexts_are_kept() {
    let pages = Image::Text.bytes(1, 64 << 10);
    let mut output = vec![0; 80 << 10];
    let mut compressor = Compressor::new();
    let (first, rest) = pages.split_at(4096);
    for codec in CODECS {
        compressor.compress(codec, &[first, rest], &mut output).unwrap();
    }
    let memory = compressor.memory();
    for codec in CODECS {
        compressor.compress(codec, &[first, rest], &mut output).unwrap();
    }
    assert_eq!(compressor.memory(), memory);
}

#[test]
fn limits_hold() {
    let pages = vec![0; BATCH_LIMIT + 1];
    let mut output = vec![0; BATCH_LIMIT];
    let lz4 = Codec::Lz4 { acceleration: 1 };
    let too_large = Err(CodecError::TooLarge { length: BATCH_LIMIT + 1 });
    assert_eq!(Compressor::new().compress(lz4, &[&pages], &mut output), too_large);
    let mut output = vec![0; BATCH_LIMIT + 1];
    let too_large = Err(CodecError::TooLarge { length: BATCH_LIMIT + 1 });
    assert_eq!(Decompressor::new().decompress(CodecId::Lz4, &[], &mut output), too_large);
    let wrong = Codec::Zstd { level: 0 };
    let error = Compressor::new().compress(wrong, &[&pages[..4096]], &mut output).unwrap_err();
    assert_eq!(error, CodecError::Parameter { codec: wrong });
}

#[test]
fn corruption_is_named() {
    let text = Image::Text.bytes(1, 2 * BLOCK_LEN);
    let mut placed = vec![0; 2 * BLOCK_LEN];
    let mut decompressor = Decompressor::new();
    let lz4 = compressed(Codec::Lz4 { acceleration: 1 }, &[&text]);
    let second = LENGTH_LEN + u32::from_le_bytes(lz4[..4].try_into().unwrap()) as usize;

    let cut = decompressor.decompress(CodecId::Lz4, &lz4[..lz4.len() - 1], &mut placed);
    assert_eq!(cut, Err(CodecError::corrupt(CodecId::Lz4, Corruption::Cut { at: second })));

    let mut longer = lz4.clone();
    longer.push(0);
    let cut = decompressor.decompress(CodecId::Lz4, &longer, &mut placed);
    assert_eq!(cut, Err(CodecError::corrupt(CodecId::Lz4, Corruption::Cut { at: lz4.len() })));

    let mut mangled = lz4.clone();
    mangled[second + LENGTH_LEN..second + LENGTH_LEN + 600].fill(0xff);
    let error = decompressor.decompress(CodecId::Lz4, &mangled, &mut placed).unwrap_err();
    let text_of = format!("corrupt lz4 data: its block at byte {second} is malformed");
    assert_eq!(error.to_string(), text_of);

    let zstd = compressed(Codec::Zstd { level: 1 }, &[&text]);
    let error =
        decompressor.decompress(CodecId::Zstd, &zstd[..zstd.len() - 1], &mut placed).unwrap_err();
    assert_eq!(error.to_string(), "corrupt zstd data: Src size is incorrect");
    let error = decompressor.decompress(CodecId::Zstd, &zstd, &mut placed[..4096]).unwrap_err();
    assert_eq!(error.to_string(), "corrupt zstd data: Destination buffer is too small");
    let fewer = compressed(Codec::Zstd { level: 1 }, &[&text[..4096]]);
    let error = decompressor.decompress(CodecId::Zstd, &fewer, &mut placed).unwrap_err();
    assert_eq!(
        error.to_string(),
        "corrupt zstd data: it holds 4096 bytes where the pages have 131072"
    );
    let error = decompressor.decompress(CodecId::None, &text[..10], &mut placed).unwrap_err();
    assert_eq!(
        error.to_string(),
        "corrupt none data: it holds 10 bytes where the pages have 131072"
    );
}

proptest! {
    #[test]
    fn slices_may_be_cut_anywhere(
        lengths in proptest::collection::vec(0_usize..90_000, 0..8),
        codec in prop::sample::select(CODECS.to_vec()),
        seed in 0_u64..4,
    ) {
        let length = lengths.iter().sum();
        let all = Image::TwoToOne.bytes(seed, length);
        let mut rest = &all[..];
        let mut slices = Vec::new();
        for length in lengths {
            let (slice, others) = rest.split_at(length);
            slices.push(slice);
            rest = others;
        }
        // However it is cut, the same comes out.
        let made = compressed(codec, &slices);
        prop_assert_eq!(&made, &compressed(codec, &[&all]));
        let mut placed = vec![0; length];
        let (head, tail) = placed.split_at_mut(length / 3);
        Decompressor::new().scatter(codec.id(), &made, &mut [head, tail]).unwrap();
        prop_assert!(placed == all);
    }

    #[test]
    fn arbitrary_input_never_panics(
        mut input in proptest::collection::vec(any::<u8>(), 0..300),
        length in 0_usize..70_000,
        from_real in any::<bool>(),
        at in 0_usize..300,
    ) {
        if from_real {
            let text = Image::Text.bytes(0, length);
            let mut real = compressed(Codec::Lz4 { acceleration: 1 }, &[&text]);
            let at = at.min(real.len());
            let count = input.len().min(real.len() - at).min(4);
            real[at..at + count].copy_from_slice(&input[..count]);
            input = real;
        }
        let mut placed = vec![0; length];
        for codec in CodecId::ALL {
            let _ = Decompressor::new().decompress(codec, &input, &mut placed);
        }
    }
}
