//! Amounts as Kubernetes writes them, as far as the command line takes them: `1500m`, `2`, `512Mi`, `128Gi`.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// Processor, in thousandths of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MilliCpu(pub u64);

/// Memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u64); 4] = [("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];

impl FromStr for MilliCpu {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<MilliCpu> {
        let milli = match text.strip_suffix('m') {
            Some(number) => number.parse::<u64>().ok(),
            None => text.parse::<u64>().ok().and_then(|cores| cores.checked_mul(1000)),
        };
        match milli {
            Some(milli @ 1..) => Ok(MilliCpu(milli)),
            _ => bail!("this takes whole cores (2) or thousandths (1500m)"),
        }
    }
}

impl fmt::Display for MilliCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}m", self.0)
    }
}

impl FromStr for Bytes {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Bytes> {
        let wanted = "this takes a whole number of Ki, Mi, Gi or Ti, such as 512Mi";
        let (number, unit) = UNITS
            .iter()
            .find_map(|&(suffix, unit)| text.strip_suffix(suffix).map(|number| (number, unit)))
            .context(wanted)?;
        match number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit)) {
            Some(bytes @ 1..) => Ok(Bytes(bytes)),
            _ => bail!(wanted),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}Ki", self.0.div_ceil(1 << 10))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_kubernetes_writes_them() {
        assert_eq!("2".parse::<MilliCpu>().unwrap(), MilliCpu(2000));
        assert_eq!("1500m".parse::<MilliCpu>().unwrap(), MilliCpu(1500));
        assert_eq!("512Mi".parse::<Bytes>().unwrap(), Bytes(536_870_912));
        assert_eq!("128Gi".parse::<Bytes>().unwrap(), Bytes(137_438_953_472));
        assert_eq!(MilliCpu(1500).to_string(), "1500m");
        assert_eq!(Bytes(536_870_912).to_string(), "524288Ki");
    }

    #[test]
    fn amounts_without_meaning_are_refused() {
        for text in ["", "0", "-1", "1.5", "m", "2c"] {
            assert!(text.parse::<MilliCpu>().is_err(), "{text:?}");
        }
        for text in ["", "0Mi", "12", "Gi", "1.5Gi", "99999999999Ti"] {
            assert!(text.parse::<Bytes>().is_err(), "{text:?}");
        }
    }
}
