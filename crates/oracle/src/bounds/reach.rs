//! Range of a sum of uncertain weights: A⁺ and A⁻ of equation (N7), by their logarithms.

/// ln Σ e^x, however large the x are.
#[derive(Debug, Clone, Copy)]
struct LogSum {
    most: f64,
    sum: f64,
}

impl LogSum {
    const EMPTY: LogSum = LogSum { most: f64::NEG_INFINITY, sum: 0.0 };

    fn add(&mut self, x: f64) {
        if x == f64::NEG_INFINITY {
            return;
        }
        if x <= self.most {
            self.sum += (x - self.most).exp();
        } else if x == f64::INFINITY || x.is_nan() {
            (self.most, self.sum) = (f64::INFINITY, 1.0);
        } else {
            self.sum = self.sum * (self.most - x).exp() + 1.0;
            self.most = x;
        }
    }

    fn ln(self) -> f64 {
        if self.sum > 0.0 { self.most + self.sum.ln() } else { f64::NEG_INFINITY }
    }
}

/// ln A⁺ and ln A⁻ (N7): how large and how small errors may make a sum of weights, which is 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reach {
    most: LogSum,
    least: LogSum,
}

impl Reach {
    /// Of no weight but what underflow may add.
    pub fn new(underflow: f64) -> Self {
        let mut reach = Reach { most: LogSum::EMPTY, least: LogSum::EMPTY };
        reach.most.add(underflow.ln());
        reach
    }

    /// Adds a weight e^`log`, whose logarithm errs by ρ.
    pub fn add(&mut self, log: f64, rho: f64) {
        self.most.add(log + rho);
        self.least.add(log - rho);
    }

    /// ln A⁻.
    pub fn least(&self) -> f64 {
        self.least.ln()
    }

    /// The largest movement of the logarithm of the sum. Roundings of P itself leave the sums a little beside 1.
    pub fn moved(&self) -> f64 {
        self.most.ln().max(-self.least()).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_of_sums_do_not_overflow() {
        let mut sum = LogSum::EMPTY;
        assert_eq!(sum.ln(), f64::NEG_INFINITY);
        for x in [f64::NEG_INFINITY, 1000.0, 2000.0, 2000.0] {
            sum.add(x);
        }
        assert_eq!(sum.ln(), 2000.0 + f64::ln(2.0));
        sum.add(f64::INFINITY);
        sum.add(3.0);
        assert_eq!(sum.ln(), f64::INFINITY);
    }
}
