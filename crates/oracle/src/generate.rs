//! Numbers from a seed, such that any language can make the same ones.
//!
//! There is no state: number `i` of a stream depends on the stream's key and on `i` alone.
//!
//! ```text
//! fnv(name)        = FNV-1a, 64 bits, of the name's UTF-8 bytes
//! mix(x)           = x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
//! key(seed, name)  = mix(seed ^ fnv(name))
//! word(i)          = mix(key + (i + 1) · 0x9E3779B97F4A7C15)              (SplitMix64, entered at i)
//! uniform(i)       = (word(i) >> 11) · 2⁻⁵³                               in [0, 1)
//! normal(i)        = (a + b + c + d − 131070) · 2⁻¹⁶ · 1.7320508075688772 with a, b, c, d the four 16-bit
//!                    fields of word(i): mean 0, variance 1, at most 3.5, and exact in binary64
//! below(i, n)      = ((word(i) >> 32) · n) >> 32                          in 0..n
//! ```
//!
//! All arithmetic on words is modulo 2⁶⁴. Every value is rounded to its storage type, to nearest
//! with ties to even, before it is used.

/// A stream of numbers.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    key: u64,
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// FNV-1a, 64 bits.
pub fn fnv(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

impl Stream {
    /// The stream of a seed and a name.
    pub fn new(seed: u64, name: &str) -> Self {
        Stream { key: mix(seed ^ fnv(name)) }
    }

    /// Word `i`: 64 random bits.
    pub fn word(&self, i: usize) -> u64 {
        mix(self.key.wrapping_add((i as u64).wrapping_add(1).wrapping_mul(GOLDEN)))
    }

    /// Number `i`, uniform in [0, 1).
    pub fn uniform(&self, i: usize) -> f64 {
        (self.word(i) >> 11) as f64 * 0.5f64.powi(53)
    }

    /// Number `i`, bell-shaped with mean 0 and variance 1.
    pub fn normal(&self, i: usize) -> f64 {
        let word = self.word(i);
        let sum: u64 = [0, 16, 32, 48].iter().map(|shift| (word >> shift) & 0xFFFF).sum();
        (sum as f64 - 131_070.0) * 0.5f64.powi(16) * 1.732_050_807_568_877_2
    }

    /// Number `i`, an integer in `0..n`.
    pub fn below(&self, i: usize, n: usize) -> usize {
        (((self.word(i) >> 32) * n as u64) >> 32) as usize
    }

    /// Number `i`, an integer in `low..=high`.
    pub fn integer(&self, i: usize, low: i64, high: i64) -> i64 {
        low + self.below(i, (high - low + 1) as usize) as i64
    }

    /// Entry `i` of the stream's draws from `list`, which is not empty.
    pub fn pick<T: Copy>(&self, i: usize, list: &[T]) -> T {
        list[self.below(i, list.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_splitmix64() {
        // The first outputs of the published SplitMix64 from state 0 (state advances by GOLDEN).
        let stream = Stream { key: 0 };
        assert_eq!(stream.word(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(stream.word(1), 0x6E78_9E6A_A1B9_65F4);
        assert_eq!(fnv("a"), 0xAF63_DC4C_8601_EC8C, "the published FNV-1a of \"a\"");
    }

    #[test]
    fn moments_are_as_stated() {
        let stream = Stream::new(1, "moments");
        let n = 20_000; // the mean's deviation is 1/√n = 0.007, the variance's below 0.01
        let draws: Vec<f64> = (0..n).map(|i| stream.normal(i)).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let variance = draws.iter().map(|x| x * x).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.035 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        assert!((0..n).all(|i| stream.below(i, 7) < 7 && stream.uniform(i) < 1.0));
    }
}
