"""The figures of the papers that this project follows, beside ours: python -m papers.report"""
