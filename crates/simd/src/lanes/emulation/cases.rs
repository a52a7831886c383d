//! Cases of sums of pairs: those that are recorded, and the text in which they are kept.

use std::fmt::Write;

/// A sum, and pairs of bf16 whose products are added to it: the even element of a pair in the low half.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Bits of the f32 to which products are added.
    pub sum: u32,
    /// One factor of each product.
    pub a: Vec<u32>,
    /// The other factors, as many.
    pub b: Vec<u32>,
}

/// Numbers of bf16 with rules of their own: zeros, ones, subnormal numbers, limits, infinities, NaN that
/// are quiet and that signal.
const SPECIAL: [u16; 14] = [
    0x0000, 0x8000, 0x3f80, 0xbfc0, 0x0001, 0x807f, 0x0080, 0x8080, 0x7f7f, 0xff7f, 0x7f80, 0xff80,
    0x7fc3, 0xff85,
];

/// The same of f32.
const SUMS: [u32; 14] = [
    0x0000_0000,
    0x8000_0000,
    0x3f80_0000,
    0xbfc0_0001,
    0x0000_0001,
    0x807f_ffff,
    0x0080_0000,
    0x8080_0001,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_1234,
    0xff80_4321,
];

/// Random bits: SplitMix64.
pub struct Bits(pub u64);

impl Bits {
    /// The next 32.
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ x >> 31) >> 32) as u32
    }

    /// One of a list.
    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.next() as usize % list.len()]
    }

    /// A number whose biased exponent lies from `low` on in as many as `wide`.
    fn near(&mut self, low: u32, wide: u32) -> u32 {
        let exponent = low + self.next() % wide;
        (self.next() & 0x807f_ffff) | exponent << 23
    }
}

/// Kinds of random cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Any bits.
    Any,
    /// Special numbers only.
    Special,
    /// NaN at some places, with bits that tell them apart.
    Nan,
    /// Numbers of like size, whose sums are rounded.
    Rounded,
    /// Numbers whose sums cancel.
    Cancelling,
    /// Products and sums about the smallest normal number.
    Small,
    /// The smallest normal number, and products about its last place.
    Edge,
    /// Products and sums about the largest number.
    Large,
}

/// All kinds.
pub const KINDS: [Kind; 8] = [
    Kind::Any,
    Kind::Special,
    Kind::Nan,
    Kind::Rounded,
    Kind::Cancelling,
    Kind::Small,
    Kind::Edge,
    Kind::Large,
];

/// A random case of `depth` pairs.
pub fn random(bits: &mut Bits, kind: Kind, depth: usize) -> Case {
    let pairs = |bits: &mut Bits, number: &mut dyn FnMut(&mut Bits) -> u16| {
        (0..depth).map(|_| u32::from(number(bits)) | u32::from(number(bits)) << 16).collect()
    };
    let mut number = |bits: &mut Bits| -> u16 {
        match kind {
            Kind::Any => bits.next() as u16,
            Kind::Special => bits.of(&SPECIAL),
            Kind::Nan => match bits.next() % (2 + depth as u32) {
                0 => (bits.next() as u16 & 0x80ff) | 0x7f01,
                1 => bits.of(&SPECIAL),
                _ => (bits.near(120, 12) >> 16) as u16,
            },
            Kind::Rounded => (bits.near(121, 12) >> 16) as u16,
            Kind::Cancelling => ((bits.near(126, 2) & 0x800f_ffff | 0x3f80_0000) >> 16) as u16,
            Kind::Small => (bits.near(58, 10) >> 16) as u16,
            Kind::Edge => (bits.near(50, 4) >> 16) as u16 & 0xffc0,
            Kind::Large => (bits.near(187, 7) >> 16) as u16,
        }
    };
    let (a, b) = (pairs(bits, &mut number), pairs(bits, &mut number));
    let sum = match kind {
        Kind::Any => bits.next(),
        Kind::Special => bits.of(&SUMS),
        Kind::Nan if bits.next().is_multiple_of(3) => bits.next() & 0x80ff_ffff | 0x7f00_0001,
        Kind::Nan | Kind::Rounded => bits.near(112, 30),
        Kind::Cancelling => bits.near(125, 3) & 0xfff0_0fff,
        Kind::Small => bits.near(0, 20),
        Kind::Edge => 0x0080_0000 | bits.next() & 0x8000_0001,
        Kind::Large => bits.near(247, 8),
    };
    Case { sum, a, b }
}

/// The cases that are recorded of one pair: special numbers on either side of a product, in either element,
/// each beside a product that is 0; NaN at two places; and some of each random kind.
pub fn of_one_pair() -> Vec<Case> {
    let mut bits = Bits(1);
    let mut cases = vec![];
    for (i, &x) in SPECIAL.iter().enumerate() {
        for &y in &SPECIAL[..=i] {
            let (a, b) = (u32::from(x), u32::from(y));
            let turned = bits.next() % 2 == 1;
            let (a, b) = if turned { (b, a) } else { (a, b) };
            let odd = bits.next() % 2 * 16;
            cases.push(Case { sum: bits.of(&SUMS), a: vec![a << odd], b: vec![b << odd] });
        }
    }
    cases.extend(two_nan());
    for kind in KINDS {
        cases.extend((0..50).map(|_| random(&mut bits, kind, 1)));
    }
    cases
}

/// NaN at two of the five places of a pair, each quiet or signalling, and of either sign.
fn two_nan() -> Vec<Case> {
    let mut cases = vec![];
    for first in 0..5 {
        for second in first + 1..5 {
            for quiet in 0..4u32 {
                let nan =
                    |place: u32, quiet: u32| 0x7f81 + place + (quiet << 6) + (place % 2) * 0x8000;
                let mut places = [0x3f80u32; 5];
                places[first] = nan(first as u32, quiet & 1);
                places[second] = nan(second as u32, quiet >> 1);
                let [sum, a0, b0, a1, b1] = places;
                cases.push(Case { sum: sum << 16, a: vec![a0 | a1 << 16], b: vec![b0 | b1 << 16] });
            }
        }
    }
    cases
}

/// The cases that are recorded of several pairs, at most 16.
pub fn of_several_pairs() -> Vec<Case> {
    let mut bits = Bits(2);
    let mut cases = vec![];
    for (depth, each) in [(2, 20), (3, 10), (16, 4)] {
        for kind in KINDS {
            cases.extend((0..each).map(|_| random(&mut bits, kind, depth)));
        }
    }
    cases
}

/// One line: the sum, the pairs of a, those of b, and the result.
pub fn line(case: &Case, result: u32) -> String {
    let mut line = format!("{:08x}", case.sum);
    for word in case.a.iter().chain(&case.b).chain([&result]) {
        write!(line, " {word:08x}").expect("a string takes text");
    }
    line
}

/// Cases and results of a text of such lines, but for those that begin with `#`.
pub fn parse(text: &str) -> Vec<(Case, u32)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let words = line.split(' ').map(|word| u32::from_str_radix(word, 16));
            let words: Vec<u32> = words.collect::<Result<_, _>>().expect("words in hexadecimal");
            let depth = (words.len() - 2) / 2;
            assert!(depth > 0 && words.len() == 2 + 2 * depth, "{line}");
            let (a, b) = words[1..=2 * depth].split_at(depth);
            (Case { sum: words[0], a: a.into(), b: b.into() }, words[1 + 2 * depth])
        })
        .collect()
}
