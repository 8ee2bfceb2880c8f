//! Measures the error of every quantization of a step on the host. It costs copies of all tensors, so it is for analysis, not for training.

use crate::cx::Cx;
use crate::record::{SiteError, planes_of};
use nibble_core::formats::{BlockAxis, Stream, hadamard};
use nibble_core::ops::{Dequantize, Hadamard, MeasureQuantization};
use nibble_core::{BlockScaled, DType, Groups, Kernels, Result, Tensor};

/// Values on the host, `[rows, cols]`, and the runs of rows that hold values: (first row, number of rows).
struct Host {
    values: Vec<f32>,
    rows: usize,
    cols: usize,
    spans: Vec<(usize, usize)>,
}

impl<B: Kernels> Cx<'_, B> {
    /// Measures a quantization of the site whose counts were kept last. Of several quantizations to one format along one axis, the first is
    /// kept; later ones belong to other micro-batches or to recomputation.
    ///
    /// # Errors
    /// From the backend.
    pub(crate) fn keep_error(
        &self,
        x: &Tensor<B>,
        quantized: &BlockScaled<B>,
        groups: Option<&Groups<B>>,
        transform: Option<&Hadamard<'_, B>>,
    ) -> Result<()> {
        let Some(errors) = &self.errors else { return Ok(()) };
        let Some(site) = self.counted.borrow().last_site() else { return Ok(()) };
        let (blocks, format) = (planes_of(quantized.axis), quantized.format.to_string());
        let is_it = |one: &SiteError| {
            (&*one.layer, &*one.tensor, one.blocks, &one.format)
                == (&*site.layer, site.tensor, blocks, &format)
        };
        if errors.borrow().iter().any(is_it) {
            return Ok(());
        }
        let mut host = Host::of(self.b, x, quantized.stack, groups)?;
        let transformed = match transform {
            None => None,
            Some(transform) => {
                // The step is on the device if the signs change with it.
                let step = if transform.step.is_some() { self.step as u32 } else { transform.signs.step };
                host.transform(quantized.axis, transform.len, &Stream { step, ..transform.signs })?;
                Some(Tensor::from_f32(self.b, &host.values, host.rows, host.cols)?)
            }
        };
        let x = transformed.as_ref().unwrap_or(x);
        let counts = MeasureQuantization { x, quantized, groups }.run(self.b)?;
        let counts = self.b.download(&counts)?;
        type Op<'a, B> = MeasureQuantization<'a, B>;
        let decoded = Dequantize { x: quantized, dtype: DType::F32 }.run(self.b)?.to_f32_vec(self.b)?;
        let (signal, noise) = host.compare(&decoded);
        errors.borrow_mut().push(SiteError {
            layer: site.layer,
            tensor: site.tensor.to_owned(),
            blocks,
            format,
            transform: transform.map_or(0, |transform| transform.len),
            values: counts[Op::<B>::VALUES],
            exact: counts[Op::<B>::EXACT],
            underflowed: counts[Op::<B>::UNDERFLOWED],
            saturated: counts[Op::<B>::SATURATED],
            signal,
            noise,
            block_amax: host.block_amax(quantized.axis, quantized.format.spec().block),
        });
        Ok(())
    }
}

impl Host {
    fn of<B: Kernels>(b: &B, x: &Tensor<B>, stack: usize, groups: Option<&Groups<B>>) -> Result<Self> {
        let spans = match groups {
            Some(groups) => {
                let (start, len) = (b.download(&groups.start)?, b.download(&groups.len)?);
                start.iter().zip(&len).map(|(start, len)| (*start as usize, *len as usize)).collect()
            }
            None => {
                let rows = x.rows / stack.max(1);
                (0..stack.max(1)).map(|matrix| (matrix * rows, rows)).collect()
            }
        };
        Ok(Self { values: x.to_f32_vec(b)?, rows: x.rows, cols: x.cols, spans })
    }

    /// Transforms the values along the axis of their blocks. After a transform along columns, a span ends with its last transform block.
    fn transform(&mut self, axis: BlockAxis, len: usize, signs: &Stream) -> Result<()> {
        let cols = self.cols;
        if axis != BlockAxis::Col {
            let mut sign = vec![0.0; cols];
            hadamard::fill_signs(signs, 0, &mut sign);
            for (start, rows) in &self.spans {
                for row in self.values[start * cols..][..rows * cols].chunks_mut(cols.max(1)) {
                    hadamard::rht(row, &sign, len)?;
                }
            }
            return Ok(());
        }
        self.spans.iter_mut().for_each(|(_, rows)| *rows = rows.next_multiple_of(len));
        let longest = self.spans.iter().map(|(_, rows)| *rows).max().unwrap_or(0);
        let end = self.spans.iter().map(|(start, rows)| start + rows).max().unwrap_or(0);
        self.rows = self.rows.max(end);
        self.values.resize(self.rows * cols, 0.0);
        let mut sign = vec![0.0; longest];
        hadamard::fill_signs(signs, 0, &mut sign);
        let mut block = vec![0.0; len];
        for (start, rows) in &self.spans {
            for k in (0..*rows).step_by(len) {
                for col in 0..cols {
                    let at = |i| (start + k + i) * cols + col;
                    (0..len).for_each(|i| block[i] = self.values[at(i)]);
                    hadamard::rht(&mut block, &sign[k..][..len], len)?;
                    (0..len).for_each(|i| self.values[at(i)] = block[i]);
                }
            }
        }
        Ok(())
    }

    /// Σx² and Σ(x − q)² over all rows with values. Values that are not finite count in neither.
    fn compare(&self, decoded: &[f32]) -> (f64, f64) {
        let (mut signal, mut noise) = (0.0, 0.0);
        for (start, rows) in &self.spans {
            let range = start * self.cols..(start + rows) * self.cols;
            for (x, q) in self.values[range.clone()].iter().zip(&decoded[range]) {
                let (x, q) = (f64::from(*x), f64::from(*q));
                if x.is_finite() && q.is_finite() {
                    signal += x * x;
                    noise += (x - q) * (x - q);
                }
            }
        }
        (signal, noise)
    }

    /// The smallest and the largest magnitude of blocks that are not zero. A block longer than a line is the line.
    fn block_amax(&self, axis: BlockAxis, block: usize) -> [f32; 2] {
        let [down, along] = match axis {
            BlockAxis::Row => [1, block],
            BlockAxis::Col => [block, 1],
            BlockAxis::Tile => [block, block],
        };
        let along = along.min(self.cols.max(1));
        let mut found = [f32::INFINITY, 0.0f32];
        for (start, rows) in &self.spans {
            let down = down.min((*rows).max(1));
            for first in (0..*rows).step_by(down) {
                let lines = first..(first + down).min(*rows);
                let mut amax = vec![0.0f32; self.cols.div_ceil(along)];
                for row in lines {
                    let values = &self.values[(start + row) * self.cols..][..self.cols];
                    for (amax, values) in amax.iter_mut().zip(values.chunks(along)) {
                        *amax = values.iter().fold(*amax, |amax, x| amax.max(x.abs()));
                    }
                }
                for amax in amax.into_iter().filter(|amax| *amax > 0.0) {
                    found = [found[0].min(amax), found[1].max(amax)];
                }
            }
        }
        if found[1] > 0.0 { found } else { [0.0; 2] }
    }
}
